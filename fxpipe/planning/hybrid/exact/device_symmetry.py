"""Which devices of a cluster are interchangeable, so that a search counts devices instead of naming them.

On 16 servers of one GPU each, a stage of 4 replicas can have 1820 sets of devices, which all take equally long. Two
devices are alike if they are of the same kind, have the same memory and share the same ports. Samples go to replicas in
the order of devices, so only neighbours in that order are interchangeable: a *run* is a longest stretch of devices that
are alike, and a stage has a count for each run.

    1 server of 4        one run of 4
    4 servers of 1       one run of 4
    2 servers of 2       two runs of 2: who shares a network card matters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby

from fxpipe.ir.cluster.cluster import Cluster

Devices = tuple[int, ...]
Counts = tuple[int, ...]


def runs(cluster: Cluster, kinds: Sequence[str] = ()) -> tuple[Devices, ...]:
    """The positions of the devices of each run. `kinds` has the kind of each device, if there are several."""
    behind: Counter[tuple[str, str]] = Counter()
    for device in cluster.devices:
        behind.update((switch.name, member) for switch, member in cluster.ports[device.label])
    joined = Counter(name for (name, _), count in behind.items() for _ in range(count))
    linked = {end for link in cluster.links for end in link.ends}

    def looks(position: int) -> Hashable:
        device = cluster.devices[position]
        ports = []
        for switch, member in cluster.ports[device.label]:
            shared = behind[switch.name, member] > 1
            if joined[switch.name] > 1:
                ports.append((switch.name, member if shared else ""))
            elif switch.through:
                ports.append((f"{switch.bandwidth} {switch.receiving}", ""))
        own = device.label if device.label in linked else ""
        kind = kinds[position] if kinds else ""
        return kind, device.memory, tuple(ports), own, device.server if cluster.links else ""

    stretches = groupby(range(len(cluster.devices)), key=looks)
    return tuple(tuple(positions) for _, positions in stretches)


def take(runs: Sequence[Devices], used: Sequence[int], counts: Counts) -> Devices:
    """The next devices of each run after the first `used` ones.

    >>> take([(0, 1, 2), (3, 4)], [1, 0], (1, 2))
    (1, 3, 4)
    """
    return tuple(sorted(d for run, u, c in zip(runs, used, counts, strict=True) for d in run[u : u + c]))
