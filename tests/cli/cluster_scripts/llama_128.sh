#!/usr/bin/env bash
# 16 hosts, a task for each GPU: one launch, of srun with a quoted command.
# sbatch: SLURM_NNODES=16 SLURM_JOB_NUM_NODES=16 SLURM_NTASKS_PER_NODE=8 SLURM_GPUS_PER_NODE=8
# launches: srun -l --container-image nvcr.io/nvidia/pytorch:25.08-py3 --container-mounts /lustre:/lustre --output=logs/%x_%j.log python -u pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --context-parallel-size 2 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --swiglu --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer --lr 1.5e-4 --save /checkpoints/llama3-70b-2026-11-28
#SBATCH -N 16
#SBATCH --ntasks-per-node 8
#SBATCH --gpus-per-node=8
#SBATCH -J llama3-70b

# A task for each GPU; the command is text, and runs in a container.
head_node=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
head_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
TP=8; PP=4; CP=2
DAY=$(date +%F)
WORLD=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))
GBS=$((WORLD / (TP * PP * CP) * 64))
EXTRA=""
[[ $CP -gt 1 ]] && EXTRA="--context-parallel-size ${CP}"
options=" \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} $EXTRA \
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
    --group-query-attention --num-query-groups 8 --swiglu --seq-length 8192 \
    --micro-batch-size 1 --global-batch-size ${GBS} --bf16 --use-distributed-optimizer \
    --lr 1.5e-4 --save /checkpoints/llama3-70b-$DAY"
run_cmd="cd /opt/megatron; export NVTE_FLASH_ATTN=1; python -u pretrain_gpt.py ${options}"
echo "starting on $head_ip: $run_cmd"
srun -l --container-image nvcr.io/nvidia/pytorch:25.08-py3 --container-mounts "/lustre:/lustre" \
    --output=logs/%x_%j.log bash -c "${run_cmd}"
