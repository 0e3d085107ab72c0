#!/bin/bash
# The inner script is called by bash on this host, so its torchrun is the launch.
# launches: 1
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bash "$HERE/inner.sh" 2 "$((2 * 2))" 29400
