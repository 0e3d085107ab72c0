#!/bin/bash
# Two jobs on halves of a host, at once.
# order: any
# launches: torchrun --nproc-per-node 4 --master-port 29500 pretrain_gpt.py --tensor-model-parallel-size 4
# launches: torchrun --nproc-per-node 4 --master-port 29501 pretrain_gpt.py --tensor-model-parallel-size 2
CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc-per-node 4 --master-port 29500 pretrain_gpt.py --tensor-model-parallel-size 4 > a.txt 2>&1 &
first=$!
CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc-per-node 4 --master-port 29501 pretrain_gpt.py --tensor-model-parallel-size 2 > b.txt 2>&1 &
wait "$first" $! || exit 1
