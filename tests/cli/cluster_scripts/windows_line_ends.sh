#!/bin/bash
# Only the value of a variable has a carriage return, from a file that was edited on Windows.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size '8\r'
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
TP=$(sed -n 1p windows.txt)
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size ${TP%$'\r'}
