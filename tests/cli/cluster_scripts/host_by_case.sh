#!/bin/bash
# What is special to each cluster, by a name with patterns.
# environment: CLUSTER=juwels-booster03
# launches: srun -N 2 --ntasks-per-node=4 python pretrain_gpt.py --tensor-model-parallel-size 4 --distributed-timeout-minutes 60
case "${CLUSTER:-$(hostname -f)}" in
    juwels*|jureca*) GPUS=4; EXTRA=(--distributed-timeout-minutes 60) ;;
    *lumi*) GPUS=8; EXTRA=(--no-gradient-accumulation-fusion) ;;
    *) echo "unknown cluster" >&2; exit 1 ;;
esac
srun -N 2 --ntasks-per-node=$GPUS python pretrain_gpt.py --tensor-model-parallel-size $GPUS "${EXTRA[@]}"
