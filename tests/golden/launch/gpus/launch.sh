#!/bin/bash
# Starts the ranks of one of 2 hosts, which all see this folder. On each host, here on the second one:
#
#     HOST_INDEX=1 FIRST_HOST=name-of-host-0 bash launch.sh --steps 100
#
# FIRST_HOST is where host 0 is found. If a rank fails, all are started again, 3 times at most, and go on from
# the newest checkpoint. Under Slurm: sbatch job.slurm --steps 100
#
# rank  device   host  GPU  stage
#    0  V100:0      0    0  0
#    1  V100:1      0    1  0
#    2  V100:2      0    2  0
#    3  V100:3      0    3  0
#    4  V100:4      0    4  0
#    5  V100:5      0    5  0
#    6  V100:6      0    6  0
#    7  V100:7      0    7  0
#    8  V100:8      1    0  0
#    9  V100:9      1    1  0
#   10  V100:10     1    2  0
#   11  V100:11     1    3  0
#   12  V100:12     1    4  0
#   13  V100:13     1    5  0
#   14  V100:14     1    6  0
#   15  V100:15     1    7  0
set -euo pipefail
cd "$(dirname "$0")"
export HOST_INDEX=${HOST_INDEX:-${SLURM_NODEID:?say which host this is: HOST_INDEX is 0 to 1}}
: "${FIRST_HOST:?say where host 0 is found: its name or address}"
PROCESSES=(8 8)  # on each host
exec torchrun --nnodes 2 --nproc-per-node "${PROCESSES[$HOST_INDEX]}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST_HOST:${PORT:-29400}" \
    --rdzv-conf "is_host=$((HOST_INDEX == 0))" train.py "$@"
