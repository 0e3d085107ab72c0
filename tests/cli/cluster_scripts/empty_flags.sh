#!/bin/bash
# An empty variable vanishes unquoted and is an empty word in quotes.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py '' --tensor-model-parallel-size 8
EXTRA= RECOMPUTE=""
[ "${USE_CP:-0}" = 1 ] && EXTRA="--context-parallel-size 2"
torchrun --nproc-per-node 8 pretrain_gpt.py $EXTRA ${RECOMPUTE:+--recompute $RECOMPUTE} --tensor-model-parallel-size 8
torchrun --nproc-per-node 8 pretrain_gpt.py "$EXTRA" --tensor-model-parallel-size 8
