#!/bin/bash
# A module puts a folder first on PATH, inside of a function that prints code; srun stays the outermost.
# launches: srun -N 2 torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
module() { eval "$(printf 'export PATH=%q/venv/bin:$PATH\n' "$PWD")"; }
main() {
    module load pytorch
    srun -N 2 torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
    torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4
}
main "$@"
