#!/bin/bash
# module is not here; without set -e the script goes on, as on a machine without it.
#SBATCH --nodes=4 --ntasks-per-node=8
# sbatch: SLURM_NNODES=4 SLURM_JOB_NUM_NODES=4 SLURM_NTASKS_PER_NODE=8
# launches: srun --cpu-bind=none python train.py --world-size 32 --tp 8
module purge
module load cuda/12.8 nccl/2.27 || echo "no modules"
ulimit -c 0
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
srun --cpu-bind=none python train.py --world-size $((SLURM_NNODES * SLURM_NTASKS_PER_NODE)) --tp 8
