#!/bin/bash
# With set -e the failed activate ends the script: nothing is started.
# launches: nothing
# status: 127
set -e
eval "$(conda shell.bash hook)"
conda activate megatron
torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 4
