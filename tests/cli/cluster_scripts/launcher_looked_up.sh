#!/bin/bash
# The launcher is looked up first: it is one of the stand-ins, under its path.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2
# launches: python -u torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
# launches: python -u -m torch.distributed.launch --use_env --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 8
TORCHRUN=$(which torchrun) || exit 5
"$TORCHRUN" --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2
python -u "$(command -v torchrun)" --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
LAUNCHER="python -u -m torch.distributed.launch --use_env"
$LAUNCHER --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 8
