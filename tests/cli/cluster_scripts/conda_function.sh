#!/bin/bash
# A conda that is a function, as its hook defines it; its prefix names the run.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --title 'mcore 0.19'
conda() {
    case $1 in
        shell.bash) printf 'export CONDA_EXE=/opt/conda/bin/conda\n' ;;
        activate) export CONDA_PREFIX=/opt/conda/envs/$2 CONDA_DEFAULT_ENV=$2 ;;
    esac
}
eval "$(conda shell.bash hook)"
set -u
conda activate "${CONDA_ENV:-mcore 0.19}"
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --title "$CONDA_DEFAULT_ENV"
