#!/bin/bash
# Braces make words without files.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path /data/train_00 /data/train_01 /data/train_02 /data/valid_00 /data/valid_01 /data/valid_02 '{a,b}' x xy
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path /data/{train,valid}_{00..02} "{a,b}" x{,y}
