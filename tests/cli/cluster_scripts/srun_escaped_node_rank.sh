#!/bin/bash
# $SLURM_NODEID is left for the shell on each host; the sizes are put in here.
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
# sbatch: SLURM_NNODES=4 SLURM_JOB_NUM_NODES=4 SLURM_GPUS_PER_NODE=8
# launches: srun --ntasks-per-node=1 torchrun --nnodes 4 --nproc_per_node 8 --node_rank 0 --rdzv_endpoint 127.0.0.1:29500 train.py --tp 4 --name 'a b'
TP=4
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
head_node_ip=$(getent hosts localhost | cut -d" " -f1)
echo Node IP: $head_node_ip
export LOGLEVEL=INFO
srun --ntasks-per-node=1 bash -c "torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_PER_NODE \
--node_rank \$SLURM_NODEID --rdzv_endpoint ${head_node_ip}:29500 train.py --tp '$TP' --name \"a b\""
