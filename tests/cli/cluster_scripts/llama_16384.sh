#!/bin/bash
# 2,048 hosts: one launch; the host's number is left for the shell on each.
# arguments: --exit-interval 10
# environment: PARTITION=large
# sbatch: SLURM_NNODES=2048 SLURM_JOB_NUM_NODES=2048
# launches: srun --ntasks-per-node=1 --kill-on-bad-exit torchrun --nproc-per-node 8 --nnodes 2048 --node-rank 0 --master-addr host0 --master-port 29500 -m compat.launch --order tp-cp-ep-dp-pp pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention --num-query-groups 8 --swiglu --seq-length 8192 --micro-batch-size 1 --global-batch-size 2048 --bf16 --exit-interval 10
#SBATCH --nodes 2048
#SBATCH --exclusive

# Llama 3 405B: 126 layers, the embedding and the loss counted as layers of the pipeline.
GPUS_PER_NODE=8
NUM_NODES=${SLURM_JOB_NUM_NODES:-1}
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
DISTRIBUTED_ARGS="--nproc-per-node $GPUS_PER_NODE --nnodes $NUM_NODES --node-rank \$SLURM_NODEID"
DISTRIBUTED_ARGS="$DISTRIBUTED_ARGS --master-addr $MASTER_ADDR --master-port 29500"
LAYOUT=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)
LAYOUT+=(--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split)
LAYOUT+=(--num-layers-per-virtual-pipeline-stage 2 --sequence-parallel)
case "$PARTITION" in
    debug) export NCCL_DEBUG=INFO ;;
    *) export NCCL_DEBUG=WARN ;;
esac
for name in NCCL_DEBUG GLOO_SOCKET_IFNAME; do
    echo "$name=${!name}"
done
LAUNCH="torchrun ${DISTRIBUTED_ARGS} -m compat.launch --order tp-cp-ep-dp-pp pretrain_gpt.py"
srun --ntasks-per-node=1 --kill-on-bad-exit sh -c "$LAUNCH ${LAYOUT[*]} \
    --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 \
    --group-query-attention --num-query-groups 8 --swiglu --seq-length 8192 \
    --micro-batch-size 1 --global-batch-size 2048 --bf16 $*"
