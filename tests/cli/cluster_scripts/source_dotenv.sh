#!/bin/bash
# A .env file without export: set -a exports what it assigns, so that torchrun reads PET_NNODES.
# launches: PET_NNODES=2 PET_NPROC_PER_NODE=8 torchrun pretrain_gpt.py --tensor-model-parallel-size 4 --title plain
set -a; source job.env; set +a
torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --title "$TITLE"
