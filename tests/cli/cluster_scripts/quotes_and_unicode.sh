#!/bin/bash
# Quotes inside of words, empty words, a tab, a newline, letters beyond ASCII: as they are.
# launches: 2
NAME="müller's 试验"
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 \
    --title "$NAME" --empty "" '' --tab $'a\tb' --lines 'first
second' --mixed a"b c"'d"e'\ f --dollar '$HOME' "\$HOME" --back 'a\b' --json '{"a": [1, "x y"]}'
torchrun --nproc-per-node 8 pretrain_gpt.py --title="${NAME// /_}" $UNSET_AND_UNQUOTED "$UNSET_AND_QUOTED" --é=1
