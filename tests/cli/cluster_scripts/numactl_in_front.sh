#!/bin/bash
# numactl in front of torchrun: what it starts is the launch.
# launches: torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 4
numactl --cpunodebind=0 --membind=0 torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 4
