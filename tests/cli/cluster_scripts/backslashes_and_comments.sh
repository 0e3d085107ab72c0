#!/bin/bash
# A blank behind a backslash ends the command early; the next line is a command of its own that is not there.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ' '
# status: 127
torchrun --nproc-per-node 8 pretrain_gpt.py \
    --num-layers 32 \ 
    --tensor-model-parallel-size 8
