#!/bin/bash
# Two hosts and pipefail: the job is started, and the script fails as its logs folder is missing.
# arguments: /data/text
# environment: SLURM_JOB_ID=7 SLURM_GPUS_ON_NODE=8 SLURM_JOB_NODELIST=dgx[1-2] 'BASH_FUNC_module%%=() { :; }' 'BASH_FUNC_scontrol%%=() { echo dgx1; }'
# sbatch: SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS_PER_NODE=1
# launches: srun torchrun --nproc_per_node 8 --nnodes 2 --rdzv_backend c10d --rdzv_endpoint dgx1:6000 --rdzv_id 7 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --seq-length 4096 --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --expert-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --data-path /data/text --bf16 --micro-batch-size 1 --global-batch-size 256
# status: 1
#SBATCH --job-name=mixtral-8x7b
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
#SBATCH --time=04:00:00
# Two hosts; torchrun on each.

set -euo pipefail
module load cuda/12.8
export CUDA_DEVICE_MAX_CONNECTIONS=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=${MASTER_PORT:-6000}
GPUS_PER_NODE=${SLURM_GPUS_ON_NODE}
NNODES=$SLURM_NNODES
DATA=$1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES
    --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv_id $SLURM_JOB_ID
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --seq-length 4096
    --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2      # inside a host
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4
    --expert-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
)
if [ "${PROFILE:-0}" = 1 ]; then
    MODEL_ARGS+=(--profile --profile-ranks 0)
fi
srun torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" \
    ${PARALLEL_ARGS[@]} --data-path "$DATA" --bf16 --micro-batch-size 1 --global-batch-size 256 \
    2>&1 | tee "logs/$SLURM_JOB_ID.txt"
