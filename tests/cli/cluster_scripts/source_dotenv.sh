#!/bin/bash
# A .env file without export: set -a exports what it assigns, so that torchrun reads PET_NNODES.
# launches: 1
set -a; source job.env; set +a
torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --title "$TITLE"
