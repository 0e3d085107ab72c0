#!/bin/bash
# The list of devices is split at its commas.
# environment: CUDA_VISIBLE_DEVICES=0,1,4,5
# launches: torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 4
IFS=',' read -ra DEVICES <<< "$CUDA_VISIBLE_DEVICES"
torchrun --nproc-per-node ${#DEVICES[@]} pretrain_gpt.py --tensor-model-parallel-size "${#DEVICES[@]}"
