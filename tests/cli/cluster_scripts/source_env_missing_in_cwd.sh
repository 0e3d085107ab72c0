#!/bin/bash
# The file is found as the script runs in its own folder.
# launches: 1
. ./env.sh || exit 3
torchrun --nproc-per-node $GPUS pretrain_gpt.py --tensor-model-parallel-size $TP ${COMMON[*]}
