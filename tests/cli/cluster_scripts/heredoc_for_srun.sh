#!/bin/bash
# srun's program reads its commands on the standard input.
# launches: srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tp 8
TP=8
srun --nodes=2 --ntasks-per-node=1 bash <<EOF
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tp $TP
EOF
