#!/bin/bash
# "$1" of a function is not that of the script: tp is 8, whatever the script is called with.
# arguments: 2 'my run' ''
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --title 'my run' '' '*'
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 2 'my run' ''
launch() {
    local tp=$1
    shift
    torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size "$tp" "$@"
}
launch 8 --title "$2" "$3" "*"
launch "$1" "$@"
