#!/bin/bash
# Run by hand, outside of an array: an empty index is element 0, so TP is 1.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 1
TPS=(1 2 4 8)
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size "${TPS[$SLURM_ARRAY_TASK_ID]}"
