#!/bin/bash
# One job for each configuration beside the script, in bash's order of names.
# launches: torchrun --nproc-per-node 8 train.py --config configs/llama.yaml --tensor-model-parallel-size 4 --title LLAMA
# launches: torchrun --nproc-per-node 8 train.py --config configs/mixtral.yaml --tensor-model-parallel-size 2 --title MIXTRAL
# launches: torchrun --nproc-per-node 8 train.py --config configs/empty.json --tensor-model-parallel-size --title EMPTY
shopt -s nullglob
for config in configs/*.yaml configs/*.json; do
    name=$(basename "${config%.*}")
    TP=$(awk '/^tensor_model_parallel_size:/ {print $2}' "$config")
    torchrun --nproc-per-node 8 train.py --config $config --tensor-model-parallel-size $TP --title "${name^^}"
done
