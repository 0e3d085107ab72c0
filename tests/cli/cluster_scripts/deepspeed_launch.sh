#!/bin/bash
# deepspeed with its own flags, JSON in a word, then the script's.
# launches: deepspeed --num_nodes 2 --num_gpus 8 --master_port 29600 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --deepspeed_config '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}'
ZERO=${ZERO:-1}
CONFIG=$(cat <<EOF
{"zero_optimization": {"stage": $ZERO}, "bf16": {"enabled": true}}
EOF
)
deepspeed --num_nodes 2 --num_gpus 8 --master_port 29600 pretrain_gpt.py \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --deepspeed_config "$CONFIG"
