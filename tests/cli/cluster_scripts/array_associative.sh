#!/bin/bash
# The model's name chooses its sizes.
# arguments: 70b
# launches: srun -N 16 --ntasks-per-node=8 python pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
declare -A TP=([7b]=1 [13b]=2 [70b]=8) PP=([7b]=1 [13b]=1 [70b]=4)
declare -A NODES=([7b]=1 [13b]=2 [70b]=16)
MODEL=${1:?usage: $0 7b|13b|70b}
srun -N "${NODES[$MODEL]}" --ntasks-per-node=8 python pretrain_gpt.py \
    --tensor-model-parallel-size "${TP[$MODEL]}" --pipeline-model-parallel-size "${PP[$MODEL]}"
