#!/bin/bash
# Sizes and a function come from a file beside the script.
# launches: PET_NNODES=2 torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16 --title 'of env'
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
TP=${TP_OVERRIDE:-$TP}
launch pretrain_gpt.py --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size $PP "${COMMON[@]}"
