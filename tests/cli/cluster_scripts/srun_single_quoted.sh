#!/bin/bash
# Within single quotes bash does nothing; variables come by the environment.
#SBATCH -N 2
# sbatch: SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2
# launches: srun torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --title 'it is'
export TP=2 PP=4
srun bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  torchrun --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --nproc-per-node 8 pretrain_gpt.py \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --title '"'it is'"'
'
