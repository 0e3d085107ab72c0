#!/bin/bash
# Apptainer inside of srun: one launch, of srun, with the container's own torchrun.
#SBATCH -N 4
#SBATCH --gres=gpu:4
# sbatch: SLURM_NNODES=4 SLURM_JOB_NUM_NODES=4
# launches: srun --ntasks-per-node=1 torchrun --nnodes=4 --nproc_per_node=4 train.py --tp 4
IMAGE=/images/pytorch_25.08.sif
BINDS="/scratch,/home"
srun --ntasks-per-node=1 apptainer exec --nv --bind "$BINDS" $IMAGE \
    torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 train.py --tp 4
