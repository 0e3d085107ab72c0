#!/bin/bash
# A flag that is commented out within the lines ends the command there, so that pp is lost.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# status: 127
torchrun --nproc-per-node 8 pretrain_gpt.py \
    --tensor-model-parallel-size 8 \
    # --context-parallel-size 2 \
    --pipeline-model-parallel-size 2
