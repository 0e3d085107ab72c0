#!/bin/bash
# What is to follow the job stands in a trap: it is started at the end.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --save ckpt
# launches: python convert.py --tensor-model-parallel-size 1 --load ckpt
finish() {
    python convert.py --tensor-model-parallel-size 1 --load "$SAVE"
}
trap finish EXIT
SAVE=ckpt
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --save $SAVE
