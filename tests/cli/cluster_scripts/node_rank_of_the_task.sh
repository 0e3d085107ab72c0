#!/bin/bash
# Run once on each host: here it is that of rank 3.
# environment: SLURM_PROCID=3 SLURM_NNODES=16 SLURM_NODEID=3 NODE_RANK=3
# launches: torchrun --nnodes 16 --node_rank=3 --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 8
NODE_RANK=${NODE_RANK:-$SLURM_PROCID}
if [ "$NODE_RANK" -eq 0 ]; then
    python -m tensorboard.main --logdir runs &
fi
torchrun --nnodes $SLURM_NNODES --node_rank=$NODE_RANK --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 8
