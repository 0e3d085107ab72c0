#!/bin/bash
# Long options by hand; what is not known is passed on in its order.
# arguments: --nodes 4 --tp=2 --lr 1e-4 --tag 'a b' --pp 8
# launches: srun --nodes=4 --ntasks-per-node=8 python -u pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --lr 1e-4 --tag 'a b'
REST=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --nodes) NODES="$2"; shift 2 ;;
        --tp=*) TP="${1#*=}"; shift ;;
        --pp) PP="$2"; shift; shift ;;
        *) REST+=("$1"); shift ;;
    esac
done
srun --nodes="$NODES" --ntasks-per-node=8 python -u pretrain_gpt.py \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" "${REST[@]}"
