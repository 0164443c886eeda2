"""Groups of devices that share each op (tensor parallelism), seen as one device each, so that planners of whole
clusters place groups as they place devices.

    8 devices in 2 servers, groups of 2        4 devices; each stands for the two of a group

A device of the new cluster stands for any one of its group: all of them have equal parts, and send and receive at the
same time. What devices do not share stays as it is: memory, speed, their ports, their network cards. What the devices
of a server share, each group has a part of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from .cluster import Cluster, Link, Switch
from .network import Rate, all_reduce

RATES = ("bandwidth", "into", "all_reduce")  # of a port; a network card is a device's own


def groups(cluster: Cluster, size: int) -> tuple[tuple[int, ...], ...]:
    """The positions of the devices of each group: neighbours of one server. Devices that are left over have none.

    >>> groups(Cluster.of(["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]), 2)
    ((0, 1), (2, 3))
    """
    found: list[tuple[int, ...]] = []
    for _, row in groupby(range(len(cluster.devices)), key=lambda at: cluster.devices[at].server):
        own = list(row)
        found += [tuple(own[at : at + size]) for at in range(0, len(own) - size + 1, size)]
    return tuple(found)


def positions(cluster: Cluster, size: int, devices: Sequence[int]) -> tuple[int, ...]:
    """The positions in `groups(cluster, size)` of the groups that devices form. Raises ValueError if they are not whole
    groups.

    >>> positions(Cluster.of(["cuda:0", "cuda:1", "cuda:2", "cuda:3"]), 2, (2, 3))
    (1,)
    """
    if size == 1:
        return tuple(devices)
    known = {own: at for at, own in enumerate(groups(cluster, size))}
    found = [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]
    for own in found:
        if own not in known:
            raise ValueError(f"devices {own} are no group: each has {size} neighbours of a server, from its first on")
    return tuple(known[own] for own in found)


def most_in_a_group(cluster: Cluster) -> int:
    """The most devices that a group may have: those of the largest server."""
    servers = [device.server for device in cluster.devices]
    return max(map(servers.count, servers), default=0)


def grouped(cluster: Cluster, size: int) -> Cluster:
    """The cluster of groups of `size` devices, each with the label of its first device. Raises ValueError if no server
    has that many devices, or devices are of several kinds."""
    if size == 1:
        return cluster
    found = groups(cluster, size)
    if not found:
        raise ValueError(f"no server has {size} devices, so none can share an op")
    if len({(device.speeds, device.memory) for device in cluster.devices}) > 1:
        raise ValueError("devices of several kinds do not share ops; plan with tensor_parallel=1")
    devices = tuple(cluster.devices[own[0]] for own in found)
    known = {device.label for device in devices} | {device.server for device in devices}
    links = tuple(_link(cluster, one, size) for one in cluster.links if known.issuperset(one.ends))
    return Cluster(devices, links, tuple(_switches(cluster, found, known)))


def _link(cluster: Cluster, one: Link, size: int) -> Link:
    """A link between servers is shared; one between devices, or within a server, is a port for each device."""
    shared = one.ends[0] != one.ends[1] and not set(one.ends) & set(cluster.labels)
    return replace(one, bandwidth=one.bandwidth / size) if shared else one


def _switches(cluster: Cluster, found: Sequence[Sequence[int]], known: set[str]) -> Iterator[Switch]:
    """The switches with what is left of their members, and of each port the part of one device of a group."""
    behind = Counter((at, port) for at, own in enumerate(found) for i in own for port in _ports(cluster, i))
    left = {port for device in known & set(cluster.labels) for port in _ports(cluster, cluster.labels.index(device))}
    for switch in cluster.switches:
        members = tuple(one for one in switch.members if (switch.name, one) in left)
        if members:
            sharing = max(count for (_, (name, _)), count in behind.items() if name == switch.name)
            rates = {name: rate / sharing for name in RATES if (rate := getattr(switch, name)) is not None}
            yield replace(switch, members=members, **rates)


def _ports(cluster: Cluster, device: int) -> list[tuple[str, str]]:
    return [(switch.name, member) for switch, member in cluster.ports[cluster.labels[device]]]


def slowest_ring(cluster: Cluster, found: Sequence[Sequence[int]]) -> Rate:
    """The rate of an all-reduce in the group in which it takes longest."""
    rates = {all_reduce(cluster, own) for own in found}
    return Rate(max(rate.latency for rate in rates), max(rate.per_byte for rate in rates))
