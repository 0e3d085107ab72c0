#!/bin/bash
# A loop by arithmetic; the batch is halved as the sequence doubles.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-size 1 --seq-length 4096 --micro-batch-size 8
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-size 2 --seq-length 8192 --micro-batch-size 4
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-size 4 --seq-length 16384 --micro-batch-size 2
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-size 8 --seq-length 32768 --micro-batch-size 1
mbs=8
for ((seq = 4096; seq <= 32768; seq *= 2)); do
    cp=$((seq / 4096))
    torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-size "$cp" \
        --seq-length $seq --micro-batch-size $mbs
    let mbs/=2 || true
done
