#!/bin/bash
# The third task of an array: the third pair of sizes, and no other.
#SBATCH --job-name=sweep
#SBATCH --array=0-3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# environment: SLURM_ARRAY_TASK_ID=2
# sbatch: SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS_PER_NODE=1
# launches: srun torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --save ckpt/tp4_pp2
TPS=(1 2 4 8)
PPS=(8 4 2 1)
TP=${TPS[$SLURM_ARRAY_TASK_ID]}
PP=${PPS[${SLURM_ARRAY_TASK_ID}]}
srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 pretrain_gpt.py \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    --save ckpt/tp${TP}_pp${PP}
