#!/bin/bash
# A size is read from a YAML file by python -c, which runs really.
# launches: torchrun --nproc-per-node 8 train.py --config configs/llama.yaml --tensor-model-parallel-size 4 --title llama
CONFIG=configs/llama.yaml
get() { python -c "
for line in open('$CONFIG'):
    name, _, value = line.partition(':')
    if name.strip() == '$1':
        print(value.split('#')[0].strip())
"; }
TP=$(get tensor_model_parallel_size)
torchrun --nproc-per-node 8 train.py --config $CONFIG --tensor-model-parallel-size "$TP" --title "$(get title)"
