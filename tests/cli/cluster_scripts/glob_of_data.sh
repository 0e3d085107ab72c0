#!/bin/bash
# Shards that lie beside the script become words, one with a blank as one word.
# launches: 2
cd -- "$(dirname -- "$0")"
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path shards/*.bin
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path none/*.bin shards/shard_[0-1].bin 'shards/*.bin'
