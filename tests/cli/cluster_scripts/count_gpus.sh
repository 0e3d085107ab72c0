#!/bin/bash
# Without a GPU the count is 0, and the user's own default of 8 counts.
# environment: CUDA_VISIBLE_DEVICES=
# launches: torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 4
NGPU=$(nvidia-smi-of-this-cluster -L 2>/dev/null | wc -l)
if [ "$NGPU" -eq 0 ]; then
    echo "no GPU is visible; using 8"
    NGPU=8
fi
torchrun --nproc_per_node="$NGPU" pretrain_gpt.py --tensor-model-parallel-size $((NGPU / 2))
