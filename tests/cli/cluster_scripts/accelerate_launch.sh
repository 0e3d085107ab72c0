#!/bin/bash
# accelerate on each host by srun; the machine's rank is left for the host.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# sbatch: SLURM_NNODES=4 SLURM_JOB_NUM_NODES=4 SLURM_NTASKS_PER_NODE=1 SLURM_GPUS_PER_NODE=8
# launches: srun --jobid 1 accelerate launch --num_processes 32 --num_machines 4 --rdzv_backend c10d --main_process_port 29500 --machine_rank 0 train.py --model_name_or_path meta/llama --tp 4
# launches: accelerate launch --num_processes 8 --num_machines 1 --mixed_precision bf16 train.py --tp 4
GPUS_PER_NODE=8
export LAUNCHER="accelerate launch --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) --num_machines $SLURM_NNODES \
    --rdzv_backend c10d --main_process_port 29500 --machine_rank \$SLURM_PROCID"
export PROGRAM="train.py --model_name_or_path meta/llama --tp 4"
srun --jobid "$SLURM_JOB_ID" bash -c "$LAUNCHER $PROGRAM"
accelerate launch --num_processes 8 --num_machines 1 --mixed_precision bf16 train.py --tp 4
