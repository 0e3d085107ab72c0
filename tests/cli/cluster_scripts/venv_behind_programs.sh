#!/bin/bash
# Within an activated environment, other programs start the launcher: timeout, nohup, a child shell.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
. venv/bin/activate
nohup torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 > nohup.txt
bash -c 'torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4'
exec timeout 1h torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
