#!/bin/bash
# nohup, timeout, nice, stdbuf and exec start the launcher themselves.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tp 1
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2
# launches: python -u -m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py --tp 4
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tp 8
nohup torchrun --nproc-per-node 8 pretrain_gpt.py --tp 1 > nohup.txt 2>&1
timeout --signal=TERM 30m torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2
nice -n 10 stdbuf -oL python -u -m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py --tp 4
exec torchrun --nproc-per-node 8 pretrain_gpt.py --tp 8
torchrun --nproc-per-node 8 never_reached.py
