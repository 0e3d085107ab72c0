#!/bin/bash
# The usual export of a .env file, which splits at blanks.
# launches: PET_NNODES=2 PET_NPROC_PER_NODE=8 torchrun pretrain_gpt.py --tensor-model-parallel-size 4 --title plain
export $(grep -v '^#' job.env | xargs)
torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --title "$TITLE"
