#!/bin/bash
# Called without its argument it says so and starts nothing.
# launches: nothing
# status: 1
if [ $# -lt 1 ]; then
    echo "Usage: $(basename "$0") CONFIG" >&2
    exit 1
fi
torchrun --nproc-per-node 8 train.py --config "$1"
