#!/bin/bash
# Within an allocation the environment's own values count, not those of the file.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
# environment: SLURM_NNODES=6 SLURM_JOB_NUM_NODES=6 SLURM_NTASKS_PER_NODE=8
# launches: srun -N 6 python train.py --world-size 48 --tensor-model-parallel-size 8
srun -N $SLURM_NNODES python train.py --world-size $((SLURM_NNODES * SLURM_NTASKS_PER_NODE)) --tensor-model-parallel-size 8
