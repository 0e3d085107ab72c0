#!/bin/bash
# A loop by arithmetic; the batch is halved as the sequence doubles.
# launches: 4
mbs=8
for ((seq = 4096; seq <= 32768; seq *= 2)); do
    cp=$((seq / 4096))
    torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-size "$cp" \
        --seq-length $seq --micro-batch-size $mbs
    let mbs/=2 || true
done
