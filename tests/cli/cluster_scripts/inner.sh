#!/bin/bash
# Started by other scripts, with tp, pp and a port.
exec torchrun --nproc-per-node 8 --master-port "${3:-29500}" pretrain_gpt.py \
    --tensor-model-parallel-size "$1" --pipeline-model-parallel-size "$2"
