#!/bin/bash
# A small script beside this one prints flags: it has no sizes of its own and runs really.
# launches: torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --global-batch-size 512 --micro-batch-size 4
FLAGS=$(python tools/batch_flags.py --gpus 16 --batch 512)
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 $FLAGS
