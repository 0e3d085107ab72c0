#!/bin/bash
# It asks; nobody answers, and the default counts.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
read -r -p "Tensor parallel size [4]: " TP
TP=${TP:-4}
read -rp "Start? [Y/n] " answer
case ${answer:-y} in [Yy]*) ;; *) exit 1 ;; esac
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP
