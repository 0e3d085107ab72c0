#!/bin/bash
# Folders that are put in front of PATH, without a launcher in them.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
export PATH=/usr/local/cuda/bin:$HOME/.local/bin:$PATH LD_LIBRARY_PATH=/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}
hash -r
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
