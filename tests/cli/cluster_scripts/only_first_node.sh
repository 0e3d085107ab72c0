#!/bin/bash
# All but the first host leave at once; here nothing says which host it is, and 0 is assumed.
# launches: mpirun -np 16 --map-by ppr:8:node python pretrain_gpt.py --tensor-model-parallel-size 8
if [ "${SLURM_PROCID:-0}" != 0 ]; then exit 0; fi
mpirun -np 16 --map-by ppr:8:node python pretrain_gpt.py --tensor-model-parallel-size 8
