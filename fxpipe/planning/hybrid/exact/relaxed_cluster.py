"""The least costs of r replicas on a cluster, over all placements.

Bounds only count devices. An all-reduce of r devices is no faster than the slowest link that is needed to connect any r
devices by the fastest links. In a transfer each sender must send at least its share through all its ports together. On
a flat network both are exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from math import inf

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.network import Behind, Rate, behind_ports, ring, split_concat
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.planning.hybrid.event_time import Problem

from .device_symmetry import Devices


@dataclass(frozen=True)
class Rates:
    """The best rates of a cluster.

    - `bandwidths`: by r, bytes per second of the best ring of r devices.
    - `ring_latency`, `latency`: the least seconds of a step of a ring, and of a transfer.
    - `share`: the least seconds per byte that a single device sends or receives.
    - `room`: by r, bytes of memory of the r-th largest device.
    """

    bandwidths: tuple[float, ...]
    ring_latency: float
    latency: float
    share: float
    room: tuple[float, ...]


def rates(problem: Problem, runs: Sequence[Devices]) -> Rates:
    """The best rates of the problem's cluster, remembered."""
    return _rates(problem.cluster, tuple(runs), problem.capped)


@lru_cache(maxsize=8)  # a search asks for each number of micro-batches
def _rates(cluster: Cluster, runs: tuple[Devices, ...], capped: bool) -> Rates:
    pairs = [(x, y) for x, y in combinations(range(len(runs)), 2)]
    pairs += [(x, x) for x, run in enumerate(runs) if len(run) > 1]
    # A larger ring may use more network cards than one of two devices.
    everywhere = behind_ports(cluster, range(len(cluster.devices)))
    looks = [_looks(cluster, run, everywhere) for run in runs]
    known: dict[Hashable, tuple[float, float, float]] = {}

    def of_two(x: int, y: int) -> tuple[float, float, float]:
        """Bandwidth and latency of a ring of two devices, and the latency of a transfer. Most pairs look alike."""
        key = looks[x], looks[y], x == y
        if key not in known:
            a, b = runs[x][0], runs[y][x == y]
            known[key] = *ring(cluster, (a, b), everywhere), split_concat(cluster, [a], [b]).latency
        return known[key]

    found = {pair: of_two(*pair) for pair in pairs}
    memory = sorted((device.memory for device in cluster.devices), reverse=True)
    room = tuple(memory) if capped else (inf,) * len(memory)
    return Rates(
        _bandwidths([len(run) for run in runs], {pair: bandwidth for pair, (bandwidth, _, _) in found.items()}),
        min((seconds for _, seconds, _ in found.values()), default=0.0),
        min((latency for _, _, latency in found.values()), default=0.0),
        1 / max(_out(cluster, run[0]) for run in runs),
        (inf, *room),
    )


def _looks(cluster: Cluster, run: Devices, behind: Behind) -> Hashable:
    """What the rates between two runs depend on: the ports above each. A switch of this run alone has no name."""
    if cluster.links:
        return run
    ports = []
    for switch, member in cluster.ports[cluster.labels[run[0]]]:
        alone = sum(behind.get((switch.name, one), 0) for one in switch.members) == len(run)
        ports.append((replace(switch, name="" if alone else switch.name, members=()), behind[switch.name, member]))
    return tuple(ports)


def _bandwidths(sizes: Sequence[int], pairs: dict[tuple[int, int], float]) -> tuple[float, ...]:
    """For each r the bytes per second of the slowest link needed to connect r devices. Runs are joined in order of
    links, the fastest first."""
    home = list(range(len(sizes)))
    whole = [1] * len(sizes)  # at the home of a run: devices that are connected so far

    def root(x: int) -> int:
        while home[x] != x:
            x = home[x]
        return x

    best = [0.0, inf]
    for (x, y), bandwidth in sorted(pairs.items(), key=lambda item: -item[1]):
        a, b = root(x), root(y)
        if x == y:
            whole[a] += sizes[x] - 1
        elif a != b:
            home[b] = a
            whole[a] += whole[b]
        best += [bandwidth] * (whole[a] + 1 - len(best))
    return tuple(best)


def _out(cluster: Cluster, position: int) -> float:
    """Bytes per second through all ports of a device at once, sending or receiving."""
    device = cluster.devices[position]
    members = {switch.name: len(switch.members) for switch, _ in cluster.ports[device.label]}
    ports = [switch for switch, _ in cluster.ports[device.label] if members[switch.name] > 1]
    links = [link for link in cluster.links if {device.label, device.server} & set(link.ends)]
    total = sum(max(switch.bandwidth, switch.receiving) for switch in ports) + sum(link.bandwidth for link in links)
    return total or inf


def _ranked(seconds: list[tuple[float, int]], r: int) -> float:
    """The seconds of the r-th fastest device, given those of each kind and how many devices are of it."""
    for own, count in sorted(seconds):
        r -= count
        if r <= 0:
            return own
    raise AssertionError("a stage has no more replicas than there are devices")


@dataclass
class Relaxed:
    """The least costs of stages of a problem, by their replicas. `must`: whether stages must, must not (False) or may
    (None) recompute."""

    problem: Problem
    rates: Rates
    must: bool | None

    @property
    def chain(self) -> Chain:
        """The costs of each layer on its fastest device."""
        return self.problem.fast

    @cached_property
    def _kinds(self) -> list[tuple[Chain, int]]:
        """The costs on each kind of device, and how many devices are of it."""
        return [(chain, self.problem.kinds.count(kind)) for kind, chain in self.problem.by_kind.items()]

    def times(self, first: int, end: int, r: int) -> tuple[float, float]:
        """Seconds of a stage forward and backward. The largest share is that of one of r replicas, and the smallest
        that of another which is no faster than the r-th fastest device."""
        share, chain = self.problem.share(r), self.chain
        forward = (chain.forwards[end] - chain.forwards[first]) * share
        backward = (chain.backwards[end] - chain.backwards[first]) * share
        if len(self._kinds) == 1:
            return forward, backward
        smallest = self._smallest(r)
        forwards = [(own.forwards[end] - own.forwards[first], count) for own, count in self._kinds]
        backwards = [(own.backwards[end] - own.backwards[first], count) for own, count in self._kinds]
        return max(forward, _ranked(forwards, r) * smallest), max(backward, _ranked(backwards, r) * smallest)

    def _smallest(self, r: int) -> float:
        samples = self.chain.samples
        return 1 / r if samples is None else samples // r / samples

    def ring(self, r: int) -> Rate:
        """The rate of an all-reduce."""
        if r == 1:
            return Rate(0.0, 0.0)
        return Rate(2 * (r - 1) * self.rates.ring_latency, 2 * (r - 1) / r / self.rates.bandwidths[r])

    def crossing(self, cut: int, r: int, q: int) -> float:
        """Seconds of one transfer from r to q replicas."""
        count, share = self.chain.cuts[cut], self.problem.share(min(r, q))
        return self.rates.latency + count * self.rates.share * share if count else 0.0

    def repeats(self, first: int, end: int, r: int, ahead: int) -> bool | None:
        """Whether a stage has to recompute; None if it does not fit in memory even so."""
        chain, problem = self.chain, self.problem
        share = problem.share(r)
        saved = (chain.saved[end] - chain.saved[first]) * share
        left = self.rates.room[r] - problem.copies * (chain.parameters[end] - chain.parameters[first])
        slack = 1e-9 * self.rates.room[r] if self.rates.room[r] < inf else 0.0
        if not self.must and ahead * saved <= left + slack:
            return False
        if self.must is False:
            return None
        return True if ahead * chain.cuts[first] * share + saved <= left + slack else None
