#!/bin/bash
# enroot exec into a container that runs.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
PID=4711
enroot exec $PID torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
