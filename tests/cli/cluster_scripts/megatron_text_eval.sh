#!/bin/bash
# The command is built as text, printed and evaluated: quotes count at the second reading.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --data-path '/data/the pile' --title 'run of a b'
OPTIONS=" \
  --tensor-model-parallel-size 2 \
  --data-path '/data/the pile' \
  --title \"run \$TITLE\""
TITLE="of a b"
run_cmd="torchrun --nproc-per-node 8 pretrain_gpt.py ${OPTIONS} $@"
echo ${run_cmd}
eval ${run_cmd}
set +x
