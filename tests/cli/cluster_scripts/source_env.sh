#!/bin/bash
# Sizes and a function come from a file beside the script.
# launches: 1
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
TP=${TP_OVERRIDE:-$TP}
launch pretrain_gpt.py --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size $PP "${COMMON[@]}"
