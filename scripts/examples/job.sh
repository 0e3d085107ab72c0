#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HYPERGRID_RECORD=/shared/first/record HYPERGRID_RECORD_AFTER=300

srun torchrun --nnodes 2 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29500" \
    -m compat.launch --shadow \
    pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64
