#!/bin/bash
# A dry run: it prints what it would start.
# arguments: --dry-run
# launches: nothing
DRY=
[[ " $* " == *" --dry-run "* ]] && DRY=echo
$DRY torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
