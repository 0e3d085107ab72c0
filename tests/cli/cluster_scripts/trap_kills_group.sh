#!/bin/bash
# It kills its process group at its end, as people copy it: nobody else may be in that group.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# status: -15
trap 'trap - TERM; kill 0' EXIT
sleep 300 &
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
