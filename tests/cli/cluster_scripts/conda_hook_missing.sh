#!/bin/bash
# There is no conda: the hook is empty, activate fails, the launch comes all the same.
# launches: torchrun --standalone --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 4
eval "$(conda shell.bash hook)"
conda activate megatron
torchrun --standalone --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 4
