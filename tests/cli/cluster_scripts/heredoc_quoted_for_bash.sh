#!/bin/bash
# bash reads a quoted here-document on its standard input; the variable is exported.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 4
export PP=2
bash -s -- 4 <<'EOF'
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $1 --pipeline-model-parallel-size $PP
EOF
bash <<-EOF
	torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size $((PP * 2))
	EOF
