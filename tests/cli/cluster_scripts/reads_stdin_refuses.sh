#!/bin/bash
# Without an answer it does not start.
# launches: nothing
# status: 1
read -r -p "Really start 2048 GPUs? " answer || exit 1
[ "$answer" = yes ] && srun -N 256 --ntasks-per-node 8 python pretrain_gpt.py --tensor-model-parallel-size 8
