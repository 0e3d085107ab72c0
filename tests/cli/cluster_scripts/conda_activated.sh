#!/bin/bash
# conda's function puts the environment's folder first on PATH.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
conda() { [ "$1" = activate ] && PATH="$PWD/venv/bin:$PATH"; }
conda activate megatron
hash -r
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 "$@"
