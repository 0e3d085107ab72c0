#!/bin/bash
# An environment with its own torchrun and python comes first on PATH: it is the usual script.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# launches: python -m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
set -euo pipefail
source venv/bin/activate
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
python -m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
