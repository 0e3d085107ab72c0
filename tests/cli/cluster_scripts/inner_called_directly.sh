#!/bin/bash
# The inner script is called by bash on this host, so its torchrun is the launch.
# launches: torchrun --nproc-per-node 8 --master-port 29400 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bash "$HERE/inner.sh" 2 "$((2 * 2))" 29400
