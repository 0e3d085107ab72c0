#!/bin/bash
# torchrun is a function of the script, which calls the program with more words.
# launches: torchrun --nnodes 2 --rdzv-backend c10d --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
torchrun() { command torchrun --nnodes 2 --rdzv-backend c10d "$@"; }
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
