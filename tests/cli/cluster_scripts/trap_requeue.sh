#!/bin/bash
# Requeue by a signal before the time limit; the job runs in the background and is waited for.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --nodes=2 --ntasks-per-node=8
# sbatch: SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS_PER_NODE=8
# launches: srun python pretrain_gpt.py --tensor-model-parallel-size 8 --exit-signal-handler
requeue() {
    echo "requeue $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1
srun python pretrain_gpt.py --tensor-model-parallel-size 8 --exit-signal-handler &
wait
