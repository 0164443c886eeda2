"""The texts of `launch.sh`, which starts the ranks of one host by torchrun, and of `job.slurm`, which starts it on all
hosts of a Slurm job."""

from __future__ import annotations

import re
from string import Template

from .rank_hosts import Hosts, first_gpus, in_order, on_cpu, table

RESTARTS = 3

ONE_HOST = Template("""\
#!/bin/bash
# Starts the $ranks ranks of train.py on this host, with its arguments:
#
#     bash launch.sh --steps 100
#
# If one fails, all are started again, $restarts times at most, and go on from the newest checkpoint.
#
$map
set -euo pipefail
cd "$$(dirname "$$0")"
${gpus}export HOST_INDEX=0
exec torchrun --standalone --nproc-per-node $ranks --max-restarts $restarts train.py "$$@"
""")

HOSTS = Template("""\
#!/bin/bash
# Starts the ranks of one of $hosts hosts, which all see this folder. On each host, here on the second one:
#
#     HOST_INDEX=1 FIRST_HOST=name-of-host-0 bash launch.sh --steps 100
#
# FIRST_HOST is where host 0 is found. If a rank fails, all are started again, $restarts times at most, and go on from
# the newest checkpoint. Under Slurm: sbatch job.slurm --steps 100
#
$map
set -euo pipefail
cd "$$(dirname "$$0")"
export HOST_INDEX=$${HOST_INDEX:-$${SLURM_NODEID:?say which host this is: HOST_INDEX is 0 to $last}}
: "$${FIRST_HOST:?say where host 0 is found: its name or address}"
PROCESSES=($counts)  # on each host
${gpus}exec torchrun --nnodes $hosts --nproc-per-node "$${PROCESSES[$$HOST_INDEX]}" --max-restarts $restarts \\
    --rdzv-backend c10d --rdzv-endpoint "$$FIRST_HOST:$${PORT:-29400}" \\
    --rdzv-conf "is_host=$$((HOST_INDEX == 0))" train.py "$$@"
""")

GPUS = Template("""\
GPUS=($lists)  # on each host
export CUDA_VISIBLE_DEVICES=$${GPUS[$${HOST_INDEX:-0}]}
""")

SLURM = Template("""\
#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$hosts
#SBATCH --ntasks-per-node=1
${resources}#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#
# Submit it in this folder, with the arguments of train.py:
#
#     sbatch job.slurm --steps 100
#
# A task for each node is a torchrun, which starts the processes of that node: launch.sh. Account, partition and time
# are those of your cluster: give them to sbatch, or write them above.
#
$map
set -euo pipefail
cd "$$SLURM_SUBMIT_DIR"
read -r FIRST_HOST < <(scontrol show hostnames "$$SLURM_JOB_NODELIST")
export FIRST_HOST PORT=$$((20000 + SLURM_JOB_ID % 20000))
exec srun --nodes=$hosts --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 bash launch.sh "$$@"
""")


def launch_script(hosts: Hosts) -> str:
    """The text of `launch.sh`."""
    counts = [len(host) for host in hosts]
    lists = " ".join(f'"{",".join(str(place.gpu) for place in host)}"' for host in hosts)
    chosen = not on_cpu(hosts) and not first_gpus(hosts)
    text = (ONE_HOST if len(hosts) == 1 else HOSTS).substitute(
        ranks=sum(counts),
        hosts=len(hosts),
        last=len(hosts) - 1,
        counts=" ".join(map(str, counts)),
        restarts=RESTARTS,
        map=_map(hosts),
        gpus=GPUS.substitute(lists=lists) if chosen else "",
    )
    return text.replace("export HOST_INDEX=0\n", "") if in_order(hosts) else text


def slurm_script(hosts: Hosts, model: str) -> str:
    """The text of `job.slurm`. As many GPUs are asked for on each node as the plan's last one there needs."""
    gpus = max(place.gpu for host in hosts for place in host) + 1
    return SLURM.substitute(
        name=f"train-{re.sub(r'[^A-Za-z0-9]+', '-', model)}",
        hosts=len(hosts),
        resources="" if on_cpu(hosts) else f"#SBATCH --gpus-per-node={gpus}\n",
        map=_map(hosts),
    )


def _map(hosts: Hosts) -> str:
    return "\n".join(f"# {row}" for row in table(hosts))
