#!/bin/bash
# The usual search for a free port; the port goes by the environment.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 9
export MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1]); s.close()')
[[ $MASTER_PORT =~ ^[0-9]+$ ]] || { echo "no port" >&2; exit 1; }
export MASTER_ADDR=127.0.0.1
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size ${#MASTER_ADDR}
