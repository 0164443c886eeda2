"""A cluster with one thing changed, to see what the change would gain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from .cluster import Cluster, Switch


def one_more(cluster: Cluster) -> Cluster:
    """The cluster with one more device: a copy of the last one, joined to all that the last one is joined to. It is in
    the last server, or in a new one if every device has a server of its own.

    >>> one_more(Cluster.of(["cpu:0", "cpu:1"])).labels
    ('cpu:0', 'cpu:1', 'cpu:2')
    """
    last, crowd = cluster.devices[-1], Counter(device.server for device in cluster.devices)
    alone = len(crowd) > 1 and max(crowd.values()) == 1
    twin = replace(
        last,
        label=_next(last.label, set(cluster.labels)),
        server=_next(last.server, set(crowd)) if alone else last.server,
    )
    twins = {last.label: twin.label, last.server: twin.server}
    switches = tuple(_joined(switch, twins) for switch in cluster.switches)
    links = [replace(e, ends=_renamed(e.ends, twins)) for e in cluster.links if twins.keys() & set(e.ends)]
    more = [e for e in links if e not in cluster.links]
    if any(set(e.ends) == {last.label, other} for e in cluster.links for other in cluster.labels):
        # Links join devices, not servers: a copy of the last device's last link joins it to the new device.
        before = next(e for e in reversed(cluster.links) if last.label in e.ends)
        more.append(replace(before, ends=(last.label, twin.label)))
    return Cluster((*cluster.devices, twin), (*cluster.links, *more), switches)


def one_more_server(cluster: Cluster) -> Cluster:
    """The cluster with one more server: a copy of the last one, joined to all that the last one is joined to. Raises
    ValueError if nothing joins the last server to others.

    >>> from .published_clusters import preset
    >>> one_more_server(preset("p100:8")).labels[-4:]
    ('P100:8', 'P100:9', 'P100:10', 'P100:11')
    """
    name, servers = cluster.devices[-1].server, {device.server for device in cluster.devices}
    taken = {*cluster.labels, *servers, *(switch.name for switch in cluster.switches)}
    twins: dict[str, str] = {}

    def twin(one: str) -> None:
        twins[one] = _next(one, taken)
        taken.add(twins[one])

    twin(name)
    for device in cluster.devices:
        if device.server == name:
            twin(device.label)
    own = [e for e in cluster.switches if e.name == name]
    left = [e for e in cluster.switches if e.name != name]
    while inner := [e for e in left if twins.keys() >= set(e.members) and e.members != (name,)]:
        for switch in inner:
            twin(switch.name)
        own += inner
        left = [e for e in left if e not in inner]
    joining = [e for e in left if twins.keys() & set(e.members)]
    links = [replace(e, ends=_renamed(e.ends, twins)) for e in cluster.links if twins.keys() & set(e.ends)]
    across = [
        e for e in cluster.links if len({name} & set(e.ends)) == 1 and set(e.ends) <= servers and len(servers) > 1
    ]
    if not joining and not across:
        raise ValueError(f"nothing joins {name!r} to other servers")
    devices = [replace(d, label=twins[d.label], server=twins[name]) for d in cluster.devices if d.server == name]
    copies = [replace(e, name=twins[e.name], members=tuple(twins[m] for m in e.members)) for e in own]
    switches = (*(_joined(e, twins) if e in joining else e for e in cluster.switches), *copies)
    more = [e for e in links if e not in cluster.links]
    more += [replace(e, ends=(name, twins[name])) for e in across[-1:]]
    return Cluster((*cluster.devices, *devices), (*cluster.links, *more), switches)


def _joined(switch: Switch, twins: dict[str, str]) -> Switch:
    new = [twins[member] for member in switch.members if member in twins]
    return replace(switch, members=tuple(dict.fromkeys((*switch.members, *new))))


def _renamed(ends: tuple[str, str], twins: dict[str, str]) -> tuple[str, str]:
    return twins.get(ends[0], ends[0]), twins.get(ends[1], ends[1])


def _next(name: str, taken: set[str]) -> str:
    """The name with the next free number.

    >>> _next("V100:7", {"V100:7", "V100:8"})
    'V100:9'
    """
    stem = name.rstrip("0123456789")
    number = int(name[len(stem) :] or 0)
    while (found := f"{stem}{number}") in taken:
        number += 1
    return found


def fewer(cluster: Cluster, count: int) -> Cluster:
    """The cluster of the first `count` devices, with the links and switches that they need. Raises ValueError if it
    has fewer, or `count` is below 1.

    >>> fewer(Cluster.of(["cpu:0", "cpu:1", "cpu:2"]), 2).labels
    ('cpu:0', 'cpu:1')
    """
    if not 1 <= count <= len(cluster.devices):
        raise ValueError(f"there are {len(cluster.devices)} devices, so {count} of them cannot be had")
    devices = cluster.devices[:count]
    known = {name for device in devices for name in (device.label, device.server)}
    members = {switch.name: switch.members for switch in cluster.switches}

    def left(name: str) -> bool:
        return name in known or any(left(member) for member in members.get(name, ()))

    switches = (replace(e, members=tuple(filter(left, e.members))) for e in cluster.switches if left(e.name))
    return Cluster(devices, tuple(e for e in cluster.links if all(map(left, e.ends))), tuple(switches))


def widened(cluster: Cluster, by: float = 2.0) -> Cluster:
    """The cluster with the bandwidths of all links and switches multiplied by `by`."""
    links = tuple(replace(e, bandwidth=e.bandwidth * by) for e in cluster.links)
    switches = tuple(
        replace(
            e,
            bandwidth=e.bandwidth * by,
            into=None if e.into is None else e.into * by,
            all_reduce=None if e.all_reduce is None else e.all_reduce * by,
            card=None if e.card is None else e.card * by,
        )
        for e in cluster.switches
    )
    return replace(cluster, links=links, switches=switches)
