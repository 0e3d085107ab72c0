#!/bin/bash
# The launch is recorded though the script then follows a log for ever.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# status: timeout
touch train.log
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 > train.log 2>&1
trap '' TERM
tail -f train.log
