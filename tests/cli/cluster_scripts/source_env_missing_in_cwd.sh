#!/bin/bash
# The file is found as the script runs in its own folder.
# launches: PET_NNODES=2 torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --bf16 --title of env
. ./env.sh || exit 3
torchrun --nproc-per-node $GPUS pretrain_gpt.py --tensor-model-parallel-size $TP ${COMMON[*]}
