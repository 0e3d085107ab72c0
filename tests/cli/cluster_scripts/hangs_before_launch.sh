#!/bin/bash
# It waits for a file of another job, for ever here.
# launches: nothing
# status: timeout
while [ ! -f /scratch/of_no_machine/data_ready ]; do sleep 0.2; done
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
