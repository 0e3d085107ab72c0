#!/bin/bash
# Preparation, training, conversion: three programs of srun, of which two train.
#SBATCH -N 2
# sbatch: SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2
# launches: srun -N1 -n1 python tools/prepare.py --input data.jsonl
# launches: srun --ntasks-per-node=8 python pretrain_gpt.py --tensor-model-parallel-size 8
# launches: srun --ntasks-per-node=8 python finetune.py --tensor-model-parallel-size 4
set -e
srun -N1 -n1 mkdir -p /scratch/out
srun -N1 -n1 python tools/prepare.py --input data.jsonl
srun --ntasks-per-node=8 python pretrain_gpt.py --tensor-model-parallel-size 8
srun --ntasks-per-node=8 python finetune.py --tensor-model-parallel-size 4
