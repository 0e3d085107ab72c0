#!/bin/bash
# Arrays that functions add to, by name.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --num-experts 8 --data-path 0.3 /data/a 0.7 '/data/b c' --tensor-model-parallel-size 2 --context-parallel-size 4
ARGS=()
add() { ARGS+=("--$1" "${@:2}"); }
add_if() { [[ -n "$2" ]] && add "$1" "$2"; }
parallel() {
    local -n into=$1
    into+=(--tensor-model-parallel-size "$2" --context-parallel-size "$3")
}
add num-layers 32
add_if expert-model-parallel-size ""
add_if num-experts "8"
add data-path 0.3 /data/a 0.7 "/data/b c"
parallel ARGS 2 4
torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
