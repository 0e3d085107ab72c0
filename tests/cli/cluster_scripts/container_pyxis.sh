#!/bin/bash
# Pyxis: the container is a flag of srun; flags in an array, mounts joined by commas.
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=4
# sbatch: SLURM_NNODES=32 SLURM_JOB_NUM_NODES=32 SLURM_NTASKS_PER_NODE=4
# launches: srun --mpi=pmix --container-image=/images/nemo.sqsh --container-mounts=/lustre:/lustre,HOME:/root,/dev/shm --no-container-mount-home python pretrain_gpt.py --tensor-model-parallel-size 4 --expert-model-parallel-size 32 --num-experts 128
MOUNTS=(/lustre:/lustre "$HOME:/root" /dev/shm)
joined=$(IFS=,; echo "${MOUNTS[*]}")
SRUN_ARGS=(--mpi=pmix --container-image=/images/nemo.sqsh --container-mounts="$joined" --no-container-mount-home)
srun "${SRUN_ARGS[@]}" python pretrain_gpt.py --tensor-model-parallel-size 4 --expert-model-parallel-size 32 --num-experts 128
