#!/bin/bash
# Flags as text, with line ends and a comment inside that is no comment: bash splits and passes it.
# launches: python -m torch.distributed.run --nproc_per_node=8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 '#' as GPT-2 --tensor-model-parallel-size 4 --data-path my-gpt2_text_document --split ''"'"'949,50,1'"'"'' --log-interval 100 --save-interval 10000 --distributed-backend nccl
GPT_ARGS="
    --num-layers 24
    --hidden-size 1024 # as GPT-2
    --tensor-model-parallel-size 4
"
DATA_ARGS="--data-path my-gpt2_text_document --split '949,50,1'"
OUTPUT_ARGS="--log-interval 100
--save-interval 10000"
python -m torch.distributed.run --nproc_per_node=8 pretrain_gpt.py \
    $GPT_ARGS $DATA_ARGS $OUTPUT_ARGS --distributed-backend nccl
