#!/bin/sh
# An executable script beside this one, by its own first line.
# launches: torchrun --nproc-per-node 8 --master-port 29401 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1
cd "$(dirname "$0")"
./inner.sh 4 1 29401
