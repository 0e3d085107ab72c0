#!/bin/bash
# xargs starts one job for each line.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
printf '%s\n' 2 4 | xargs -I{} torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size {}
