#!/bin/bash
# Quotes inside of words, empty words, a tab, a newline, letters beyond ASCII: as they are.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --title 'müller'"'"'s 试验' --empty '' '' --tab 'a	b' --lines 'first\nsecond' --mixed 'ab cd"e f' --dollar '$HOME' '$HOME' --back 'a\b' --json '{"a": [1, "x y"]}'
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py '--title=müller'"'"'s_试验' '' '--é=1'
NAME="müller's 试验"
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 \
    --title "$NAME" --empty "" '' --tab $'a\tb' --lines 'first
second' --mixed a"b c"'d"e'\ f --dollar '$HOME' "\$HOME" --back 'a\b' --json '{"a": [1, "x y"]}'
torchrun --nproc-per-node 8 pretrain_gpt.py --title="${NAME// /_}" $UNSET_AND_UNQUOTED "$UNSET_AND_QUOTED" --é=1
