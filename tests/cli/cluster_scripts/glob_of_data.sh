#!/bin/bash
# Shards that lie beside the script become words, one with a blank as one word.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path 'shards/shard of rest.bin' shards/shard_0.bin shards/shard_1.bin
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path 'none/*.bin' shards/shard_0.bin shards/shard_1.bin 'shards/*.bin'
cd -- "$(dirname -- "$0")"
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path shards/*.bin
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path none/*.bin shards/shard_[0-1].bin 'shards/*.bin'
