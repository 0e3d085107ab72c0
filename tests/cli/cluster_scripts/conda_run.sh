#!/bin/bash
# conda run stands in front and is not here: nothing is launched, status 127.
# launches: nothing
# status: 127
conda run --no-capture-output -n megatron torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2
