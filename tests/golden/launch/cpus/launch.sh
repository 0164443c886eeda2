#!/bin/bash
# Starts the 4 ranks of train.py on this host, with its arguments:
#
#     bash launch.sh --steps 100
#
# If one fails, all are started again, 3 times at most, and go on from the newest checkpoint.
#
# rank  device  host  CPU  stage
#    0  cpu:0      0    0  0
#    1  cpu:1      0    1  1
#    2  cpu:2      0    2  2
#    3  cpu:3      0    3  3
set -euo pipefail
cd "$(dirname "$0")"
exec torchrun --standalone --nproc-per-node 4 --max-restarts 3 train.py "$@"
