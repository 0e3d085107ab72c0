#!/bin/bash
# The data is not on this machine, so the script ends before it starts the job.
# launches: nothing
# status: 66
set -euo pipefail
DATA=/lustre/of_no_machine/text_document
[[ -f $DATA.bin ]] || { echo "no data at $DATA" >&2; exit 66; }
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --data-path "$DATA"
