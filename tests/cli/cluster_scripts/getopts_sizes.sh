#!/bin/bash
# Options in any order, one given twice: the last counts.
# arguments: -t 2 -p4 -n "two words" -t 8 -v -- --bf16 --lr 1e-4
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --title 'two words' --log-throughput --bf16 --lr 1e-4
usage() { echo "usage: $0 [-t TP] [-p PP] [-n NAME] [-v]" >&2; exit 2; }
tp=1 pp=1 name=run verbose=
while getopts ":t:p:n:vh" opt; do
    case "$opt" in
        t) tp=$OPTARG ;;
        p) pp=$OPTARG ;;
        n) name=$OPTARG ;;
        v) verbose=1 ;;
        h | *) usage ;;
    esac
done
shift $((OPTIND - 1))
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size "$tp" \
    --pipeline-model-parallel-size "$pp" --title "$name" ${verbose:+--log-throughput} "$@"
