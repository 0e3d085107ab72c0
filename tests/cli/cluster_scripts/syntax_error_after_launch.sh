#!/bin/bash
# bash reads line by line: the launch comes before the error is met.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# status: 2
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
if [ -f x ]; then
    echo unfinished
