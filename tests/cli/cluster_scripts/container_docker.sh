#!/bin/bash
# docker run, with the command as one word for bash.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path '/data/a b'
docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -e NCCL_DEBUG=WARN -v "$HOME/data":/data:ro \
    nvcr.io/nvidia/pytorch:25.08-py3 bash -lc "cd /workspace && torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path '/data/a b'"
