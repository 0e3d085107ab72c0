#!/bin/bash
# A run function that prints, measures and starts "$@"; the log goes through a pipe.
# launches: torchrun --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size=2 --split 949,50,1
# launches: python -m torch.distributed.run --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size=4
set -o pipefail
log() { printf '[%s] %s\n' "$(date +%T)" "$*" >&2; }
run() {
    log "+ $*"
    time "$@" 2>&1 | tee -a run.log
}
run torchrun --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size=2 --split 949,50,1
run python -m torch.distributed.run --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size=4
