#!/bin/bash
# The flags of array task n stand in line n of a file beside the script; quotes in it are words' own.
# environment: SLURM_ARRAY_TASK_ID=2
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --title ''"'"'a' 'b'"'"''
cd "$(dirname "$0")" || exit 1
FLAGS=$(sed -n "${SLURM_ARRAY_TASK_ID}p" sweep.txt)
torchrun --nproc-per-node 8 pretrain_gpt.py $FLAGS
