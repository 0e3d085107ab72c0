#!/bin/bash
# Braces make words without files.
# launches: 1
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path /data/{train,valid}_{00..02} "{a,b}" x{,y}
