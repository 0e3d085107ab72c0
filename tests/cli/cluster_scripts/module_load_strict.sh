#!/bin/bash -l
# set -e and a module command, as a cluster has it.
# launches: srun python train.py --tp 8
set -euo pipefail
module load cuda/12.8
srun python train.py --tp 8
