#!/bin/bash
# Sizes of the job come from srun's own flags, kept in a text.
#SBATCH --job-name="llama 3"
#SBATCH --partition=gpu  # inline comment
##SBATCH --nodes=64
#SBATCH --nodes=2
# sbatch: SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_JOB_ID=1
# launches: srun --wait=60 --kill-on-bad-exit=1 --nodes=2 --ntasks-per-node=8 --jobid 1 python -u train.py --tensor-model-parallel-size 8
SRUN_ARGS="--wait=60 --kill-on-bad-exit=1 --nodes=$SLURM_JOB_NUM_NODES --ntasks-per-node=8"
srun $SRUN_ARGS --jobid $SLURM_JOB_ID python -u train.py --tensor-model-parallel-size 8
#SBATCH --nodes=128
