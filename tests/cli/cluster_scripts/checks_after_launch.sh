#!/bin/bash
# The status of the launch decides what follows: it is 0 here.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# launches: torchrun --nproc-per-node 8 evaluate.py --tensor-model-parallel-size 4
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
status=$?
if ((status != 0)); then
    python -m torch.distributed.run --nproc-per-node 1 collect_logs.py
    exit $status
fi
torchrun --nproc-per-node 8 evaluate.py --tensor-model-parallel-size 4
