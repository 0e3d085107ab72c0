#!/bin/bash
# It asks torchrun for its flags first; the answer is empty here, so that the old spelling is taken.
# launches: torchrun --help
# launches: torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 8
NPROC="--nproc_per_node"
torchrun --help 2>/dev/null | grep -q -- --nproc-per-node && NPROC="--nproc-per-node"
torchrun "$NPROC" 8 pretrain_gpt.py --tensor-model-parallel-size 8
