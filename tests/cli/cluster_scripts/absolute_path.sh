#!/bin/bash
# The launcher is called by its path, which no PATH changes: it is not seen, and not here either.
# launches: nothing
# status: 127
BIN=/opt/of_no_machine/envs/megatron/bin
$BIN/torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
