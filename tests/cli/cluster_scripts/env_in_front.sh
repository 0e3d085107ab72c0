#!/bin/bash
# env in front of the launcher, and env as a list, which runs really.
# launches: PET_NNODES=2 PET_RDZV_ENDPOINT=head:29500 torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
export NCCL_DEBUG=WARN
env | grep ^NCCL > nccl.txt
[ -s nccl.txt ] || exit 4
env -u NCCL_DEBUG PET_NNODES=2 "PET_RDZV_ENDPOINT=head:29500" torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
