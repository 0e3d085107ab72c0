#!/bin/bash
# Python computes the sizes from a here-document: the real Python runs.
# launches: srun -N 8 --ntasks-per-node 8 python3 pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
read -r TP PP <<< "$(python3 - 64 <<'EOF'
import sys
world_size = int(sys.argv[1])
tensor_model_parallel_size = min(8, world_size)
print(tensor_model_parallel_size, world_size // 8 // 2)
EOF
)"
srun -N 8 --ntasks-per-node 8 python3 pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
