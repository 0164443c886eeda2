"""Two hosts: network namespaces, joined by a cable, which is a veth pair. Each has a torchrun of its own.

    west  10.0.0.1 ──────── 10.0.0.2  east

They have no names, but are those of our own processes, of which the first takes all others with it when it ends; so
nothing is left, however a test ends. No root is needed where users may make namespaces.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ALONE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]

# Runs "$@" on both hosts at once, with their HOST and ADDRESS. To move the end of the cable takes until east is there.
BOTH = """
set -e
export HOST=west ADDRESS=10.0.0.1 PLUG='
    ip address add $ADDRESS/24 dev $HOST
    ip link set lo up
    ip link set $HOST up
'
ip link add name west type veth peer name east
eval "$PLUG"
HOST=east ADDRESS=10.0.0.2 unshare --net sh -ec '
    until ip link show east; do sleep 0.1; done
    eval "$PLUG"
    exec "$@"
' - "$@" &
east=$!
while ip link show east; do ip link set east netns $east; sleep 0.1; done
"$@" &
wait $!
wait $east
"""

# One rendezvous for both agents, at home on west: torchrun does not see by itself that the address is its own.
TORCHRUN = """
export GLOO_SOCKET_IFNAME=$HOST
if [ $HOST = west ]; then home=1; else home=0; fi
exec "$0" -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --max-restarts 1 --rdzv-backend c10d \
    --rdzv-endpoint 10.0.0.1:29400 --rdzv-conf is_host=$home --local-addr $ADDRESS "$@"
"""


def on_both(*command: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command on both hosts; what it writes goes to one output."""
    return subprocess.run(
        [*ALONE, "sh", "-c", BOTH, "-", *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.fixture
def hosts() -> None:
    """Skips where there can be none, and says why."""
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        pytest.skip(f"two hosts are made with {missing[0]}, which is not here")
    tried = on_both("true", timeout=60)
    if tried.returncode:
        pytest.skip(f"this machine lets nobody make two hosts: {tried.stdout}")


@pytest.mark.long
@pytest.mark.usefixtures("hosts")
def test_two_ranks_on_each_of_two_hosts(tmp_path: Path) -> None:
    """They train as the plain model does. One is killed, on east; torchrun starts all of them again, on both hosts, and
    they go on from the last checkpoint."""
    script = ["-m", "tests.whole.ranks.host", str(tmp_path)]
    found = on_both("sh", "-ec", TORCHRUN, sys.executable, *script, timeout=300)
    assert found.returncode == 0, found.stdout
    compared = [line for line in found.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(compared) == [f"rank {rank} has compared steps 3 to 5" for rank in range(4)], found.stdout
