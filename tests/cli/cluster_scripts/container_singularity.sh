#!/bin/bash
# Singularity on one host, without srun; its own variables by --env.
# launches: python -m torch.distributed.run --nproc_per_node 8 /workspace/pretrain_gpt.py --tensor-model-parallel-size 8
SIF="${SIF:-/images/my image.sif}"
singularity exec --nv -B "$PWD:/workspace" --env NCCL_DEBUG=INFO,OMP_NUM_THREADS=8 "$SIF" \
    python -m torch.distributed.run --nproc_per_node 8 /workspace/pretrain_gpt.py --tensor-model-parallel-size 8
