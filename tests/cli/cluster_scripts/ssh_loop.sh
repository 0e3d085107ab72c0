#!/bin/bash
# A launcher on each host of a file, with its rank; the last one in the foreground.
# order: any
# launches: torchrun --nnodes 3 --node-rank 0 --master-addr dgx01 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# launches: torchrun --nnodes 3 --node-rank 1 --master-addr dgx01 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# launches: torchrun --nnodes 3 --node-rank 2 --master-addr dgx01 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
mapfile -t HOSTS < <(grep -v '^#' hosts.txt)
NNODES=${#HOSTS[@]}
rank=0
for host in "${HOSTS[@]}"; do
    ssh -n -o StrictHostKeyChecking=no "$host" "cd $HOME/megatron && torchrun --nnodes $NNODES --node-rank $rank --master-addr ${HOSTS[0]} --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8" &
    rank=$((rank + 1))
done
wait
