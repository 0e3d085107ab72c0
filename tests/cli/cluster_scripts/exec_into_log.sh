#!/bin/bash
# All output goes to a file and to the screen by a process of its own.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
mkdir -p logs
exec > >(tee -a "logs/$(date +%F).log") 2>&1
set -x
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
