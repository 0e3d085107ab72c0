#!/bin/bash
# ibrun of TACC takes the tasks from SLURM.
#SBATCH -N 8
#SBATCH -n 32
#SBATCH -p gh
# sbatch: SLURM_NNODES=8 SLURM_JOB_NUM_NODES=8 SLURM_NTASKS=32 SLURM_NPROCS=32
# launches: ibrun -np 32 python3 pretrain_gpt.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 8
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
ibrun -np $SLURM_NTASKS python3 pretrain_gpt.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 8
