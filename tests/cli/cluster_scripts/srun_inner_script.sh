#!/bin/bash
# srun starts a script of ours on each host; what that one starts is not seen from here.
#SBATCH --nodes 8
#SBATCH --ntasks-per-node 1
# sbatch: SLURM_NNODES=8 SLURM_JOB_NUM_NODES=8 SLURM_NTASKS_PER_NODE=1
# launches: srun --kill-on-bad-exit=1 torchrun --nproc-per-node 8 --master-port 10001 pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
export MASTER_ADDR=$(scontrol show hostnames | head -n1)
export MASTER_PORT=$(expr 10000 + $(echo -n ${SLURM_JOB_ID:-12345} | tail -c 4))
srun --kill-on-bad-exit=1 ./inner.sh 8 4 "$MASTER_PORT"
