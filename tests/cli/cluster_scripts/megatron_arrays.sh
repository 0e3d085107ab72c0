#!/bin/bash
# As Megatron-LM's own examples: arrays for each part, positional paths, a container's torchrun.
# arguments: /ckpt /tb 'vocab with blank.json' merges.txt /data/text_document
# launches: torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr localhost --master_port 6000 pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 192 --lr 6.0e-5 --weight-decay 0.1 --bf16 --data-path /data/text_document --vocab-file 'vocab with blank.json' --merge-file merges.txt --split 949,50,1 --save /ckpt --load /ckpt --tensorboard-dir /tb
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=2
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<Specify path>
TENSORBOARD_LOGS_PATH=$2 #<Specify path>
VOCAB_FILE=$3
MERGE_FILE=$4
DATA_PATH=$5
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK   # of this host
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 2
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size $((WORLD_SIZE * 12))
    --lr 6.0e-5
    --weight-decay 0.1
    --bf16
)
DATA_ARGS=(
    --data-path $DATA_PATH
    --vocab-file "$VOCAB_FILE"
    --merge-file $MERGE_FILE
    --split 949,50,1
)
EVAL_AND_LOGGING_ARGS=(
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --tensorboard-dir $TENSORBOARD_LOGS_PATH
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    "${DATA_ARGS[@]}" \
    ${EVAL_AND_LOGGING_ARGS[@]}
