#!/bin/bash
# Variables before the command reach this launch and no later one.
# launches: PET_NNODES=4 PET_NPROC_PER_NODE=8 torchrun pretrain_gpt.py --tensor-model-parallel-size 8
# launches: PET_NPROC_PER_NODE=2 torchrun pretrain_gpt.py --tensor-model-parallel-size 2
PET_NNODES=4 PET_NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1 torchrun pretrain_gpt.py --tensor-model-parallel-size 8
PET_NPROC_PER_NODE=2 torchrun pretrain_gpt.py --tensor-model-parallel-size 2
