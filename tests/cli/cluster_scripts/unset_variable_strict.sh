#!/bin/bash
# set -u and a variable that only the cluster has: no launch, status 1.
# launches: nothing
# status: 1
set -u
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP_OF_THE_CLUSTER
