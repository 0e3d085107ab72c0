#!/bin/bash
# An alias counts in a script only after shopt, and from the next line.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
shopt -s expand_aliases
alias trun='torchrun --nproc-per-node 8'
trun pretrain_gpt.py --tensor-model-parallel-size 8
