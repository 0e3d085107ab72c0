#!/bin/bash
# An option that it does not know: its usage and status 2, no launch.
# arguments: -x 2
# launches: nothing
# status: 2
while getopts "t:" opt; do
    case $opt in
        t) tp=$OPTARG ;;
        *) echo "usage: $0 -t TP" >&2; exit 2 ;;
    esac
done
torchrun --nproc-per-node 8 pretrain_gpt.py --tp $tp
