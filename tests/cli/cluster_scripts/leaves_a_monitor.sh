#!/bin/bash
# A monitor stays behind in the background and holds the output open: the script has ended all the same.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
(while true; do date; sleep 2; done) &
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
