"""Seconds of messages that share a network: the transfer from a stage of several replicas to the next, and the
all-reduce of their gradients.

Both are linear in the bytes, so a `Rate` is computed once for two sets of devices and serves every size. It adds up,
for each port and link, the share of the bytes that crosses it. Messages move at the same time, so the slowest port or
link sets the pace.

    senders 0, 1 (server a)     0 --half--> 2     inside server a half of the bytes cross the ports of 0 and 2,
    receivers 2 (a), 3 (b)      1 --half--> 3     and the other half the network cards of a and b
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fxpipe.ir.replica_shares import in_common

from .cluster import Cluster, Link, Switch, link, meeting

Key = tuple[str, str, str]  # the switch or link, what is behind the port, the direction
Use = tuple[Key, float]  # a port and its bytes per second
Devices = tuple[int, ...]
Behind = Mapping[tuple[str, str], int]  # how many devices are behind each port, by (switch, member)


class Rate(NamedTuple):
    """Seconds for `count` bytes: `latency + count * per_byte`; 0 for no bytes."""

    latency: float
    per_byte: float

    def seconds(self, count: float) -> float:
        return self.latency + count * self.per_byte if count else 0.0


def split_concat(
    cluster: Cluster, senders: Sequence[int], receivers: Sequence[int], samples: int | None = None
) -> Rate:
    """The rate at which a micro-batch of `samples` samples goes from the replicas of one stage to those of another;
    with None, shares are ideal. Devices are positions in the cluster.

    Each sender has a slice of the samples and each receiver needs one, both in ascending order, as
    `fxpipe.ir.replica_shares` deals them. A sender sends a receiver what their slices have in common; within one device
    nothing moves.
    """
    return rate_of(cluster, slices(sorted(senders), sorted(receivers), samples))


def hand_over(
    cluster: Cluster, before: Sequence[Devices], after: Sequence[Devices], samples: int | None = None
) -> tuple[Rate, Rate]:
    """The rates at which a micro-batch goes from the replicas of one stage to those of the next, and its gradient back;
    each replica is a group of devices that share each op. The bytes are those that a device of the later stage needs.

        before, a group of 2    0   1            device l of a later group takes what it needs from device
        after, a group of 4    2 3 4 5           l mod 2 of the earlier one: 0 > 2, 1 > 3, 0 > 4, 1 > 5
    """

    def messages(forth: bool) -> Iterator[tuple[int, int, float]]:
        for i, j, share in slices(range(len(before)), range(len(after)), samples):
            for lane, device in enumerate(after[j]):
                ends = before[i][lane % len(before[i])], device
                yield *(ends if forth else ends[::-1]), share

    return rate_of(cluster, messages(True)), rate_of(cluster, messages(False))


def rate_of(cluster: Cluster, messages: Iterable[tuple[int, int, float]]) -> Rate:
    """The rate of messages that move at the same time: (sender, receiver, share of the bytes)."""
    shares: dict[Key, float] = {}
    latency = 0.0
    for sender, receiver, share in messages:
        if sender == receiver:
            continue
        a, b = cluster.labels[sender], cluster.labels[receiver]
        for key, bandwidth in way(cluster, a, b):
            shares[key] = shares.get(key, 0.0) + share / bandwidth
        latency = max(latency, link(cluster, a, b).latency)
    return Rate(latency, max(shares.values(), default=0.0))


def slices(
    senders: Sequence[int], receivers: Sequence[int], samples: int | None = None
) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, share of all samples that goes from one to the other); ideal shares if `samples` is None.

    >>> list(slices([0, 1], [2, 3, 4, 5]))
    [(0, 2, 0.25), (0, 3, 0.25), (1, 4, 0.25), (1, 5, 0.25)]
    >>> list(slices([0, 1], [2, 3, 4, 5], samples=2))
    [(0, 2, 0.5), (1, 3, 0.5)]
    """
    r, q = len(senders), len(receivers)
    dealt = r * q if samples is None else samples  # of r * q samples both sides have equal shares
    for i, j, both in in_common(dealt, r, q):
        yield senders[i], receivers[j], both / dealt


def way(cluster: Cluster, a: str, b: str) -> Iterator[Use]:
    """The ports, or the link, that a message from `a` to `b` crosses, with their bytes per second."""
    between = link(cluster, a, b)
    if between in cluster.links:
        yield from _along(cluster, between, a, b)
        return
    top = meeting(cluster, a, b)
    assert top is not None
    for switch, member in _up(cluster, a, top):
        yield (switch.name, member, "out"), switch.bandwidth
        if switch.card is not None:
            yield (switch.name, a, "out"), switch.card
    for switch, member in _up(cluster, b, top):
        yield (switch.name, member, "into"), switch.receiving
        if switch.card is not None:
            yield (switch.name, b, "into"), switch.card


def _along(cluster: Cluster, between: Link, a: str, b: str) -> Iterator[Use]:
    """A link within a server is a port for each device; one between servers is shared by all of them."""
    name = " - ".join(between.ends)
    servers = cluster.device(a).server, cluster.device(b).server
    if set(between.ends) == {a, b} or servers[0] == servers[1]:
        yield (name, a, "out"), between.bandwidth
        yield (name, b, "into"), between.bandwidth
    else:
        yield (name, servers[0], "out"), between.bandwidth


def _up(cluster: Cluster, label: str, top: Switch) -> Iterator[tuple[Switch, str]]:
    for switch, member in cluster.ports[label]:
        if switch.name == top.name or switch.through:
            yield switch, member
        if switch.name == top.name:
            return


def all_reduce(cluster: Cluster, devices: Sequence[int]) -> Rate:
    """The rate of an all-reduce of r replicas in a ring: each sends 2 (r - 1) / r of the bytes."""
    r = len(devices)
    if r == 1:
        return Rate(0.0, 0.0)
    bandwidth, latency = ring(cluster, tuple(sorted(devices)))
    return Rate(2 * (r - 1) * latency, 2 * (r - 1) / r / bandwidth)


def all_gather(reduced: Rate) -> Rate:
    """The rate of an all-gather in a ring, or of a reduce-scatter, from that of an all-reduce, which is one of each."""
    return Rate(reduced.latency / 2, reduced.per_byte / 2)


def ring(cluster: Cluster, devices: Sequence[int], behind: Behind | None = None) -> tuple[float, float]:
    """The least bandwidth and the longest latency between neighbours in the ring of these devices. Where devices have
    network cards of their own, as many rings as a server has devices in it run beside each other, one over each card;
    `behind` counts the devices whose cards they use, if not those of the ring."""
    behind = behind_ports(cluster, devices) if behind is None else behind
    steps = [_step(cluster, a, b, behind) for a, b in zip(devices, (*devices[1:], devices[0]), strict=True)]
    return min(bandwidth for bandwidth, _ in steps), max(latency for _, latency in steps)


def behind_ports(cluster: Cluster, devices: Iterable[int]) -> Behind:
    """How many of these devices are behind each port."""
    found: dict[tuple[str, str], int] = {}
    for device in devices:
        for switch, member in cluster.ports[cluster.labels[device]]:
            found[switch.name, member] = found.get((switch.name, member), 0) + 1
    return found


def _step(cluster: Cluster, i: int, j: int, behind: Behind) -> tuple[float, float]:
    a, b = cluster.labels[i], cluster.labels[j]
    between = link(cluster, a, b)
    top = None if between in cluster.links else meeting(cluster, a, b)
    if top is None:
        return between.bandwidth, between.latency
    bandwidth = between.bandwidth if top.all_reduce is None else top.all_reduce
    if top.card is not None:
        rings = min(
            behind[top.name, member] for end in (a, b) for s, member in cluster.ports[end] if s.name == top.name
        )
        ports = min(top.bandwidth, top.receiving) if top.all_reduce is None else top.all_reduce
        bandwidth = min(ports, rings * top.card)
    return bandwidth, between.latency
