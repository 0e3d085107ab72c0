#!/bin/bash
# The job was started; the report after it fails, and its status is that of the script.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# status: 3
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
grep -q "training done" train_log_that_is_not_there.txt 2>/dev/null || exit 3
