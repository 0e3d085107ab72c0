#!/bin/bash
# dp, batch and virtual stages by arithmetic; 010 is eight, 10#08 too.
#SBATCH --nodes=16 --ntasks-per-node=8
# sbatch: SLURM_NNODES=16 SLURM_JOB_NUM_NODES=16 SLURM_NTASKS_PER_NODE=8
# launches: srun python pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --global-batch-size 64 --num-layers-per-virtual-pipeline-stage 4 --lr .00030
WORLD_SIZE=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))
TP=010 PP=$((10#08 / 2))
DP=$(( WORLD_SIZE / (TP * PP) ))
((DP >= 1)) || exit 1
srun python pretrain_gpt.py --tensor-model-parallel-size $((TP)) --pipeline-model-parallel-size $PP \
    --global-batch-size $((DP * 4 << 2)) --num-layers-per-virtual-pipeline-stage $((80 / PP / 5)) --lr $(echo "scale=5; 3/10000" | bc 2>/dev/null || echo 0.0003)
