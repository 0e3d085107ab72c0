#!/bin/bash
# One job for each configuration beside the script, in bash's order of names.
# launches: 3
shopt -s nullglob
for config in configs/*.yaml configs/*.json; do
    name=$(basename "${config%.*}")
    TP=$(awk '/^tensor_model_parallel_size:/ {print $2}' "$config")
    torchrun --nproc-per-node 8 train.py --config $config --tensor-model-parallel-size $TP --title "${name^^}"
done
