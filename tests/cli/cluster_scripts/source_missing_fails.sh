#!/bin/bash
# The cluster's set-up is not on this machine, and set -e ends the script before it launches.
# launches: nothing
# status: 1
set -e
source /etc/profile.d/lustre_modules_of_cluster.sh
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
