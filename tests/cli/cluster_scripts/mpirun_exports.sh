#!/bin/bash
# mpirun with variables to pass on, over two lines, and a host list of its own making.
# launches: mpirun -np 24 -H a100-01:8,a100-02:8,a100-03:8 --bind-to none -x PATH -x NCCL_IB_HCA -x MASTER_ADDR=a100-01 -mca pml ob1 -mca btl '^openib' python pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 3
HOSTS=(a100-01 a100-02 a100-03)
HOSTLIST=$(printf "%s:8," "${HOSTS[@]}")
HOSTLIST=${HOSTLIST%,}
NP=$((${#HOSTS[@]} * 8))
export NCCL_IB_HCA='^mlx5_bond'
mpirun -np $NP -H $HOSTLIST --bind-to none -x PATH -x NCCL_IB_HCA -x MASTER_ADDR="${HOSTS[0]}" \
    -mca pml ob1 -mca btl ^openib \
    python pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 3
