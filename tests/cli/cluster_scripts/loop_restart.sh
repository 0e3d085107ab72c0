#!/bin/bash
# Starts again until the job ends well: here the first try does.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --load ckpt
tries=0
until torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --load ckpt; do
    tries=$((tries + 1))
    [ "$tries" -ge 5 ] && exit 1
    sleep 1
done
