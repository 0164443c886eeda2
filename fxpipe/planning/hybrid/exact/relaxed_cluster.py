"""The least costs of r replicas on a cluster, over all placements.

Bounds only count devices. An all-reduce of r devices is no faster than the slowest link that is needed to connect any r
devices by the fastest links. In a transfer each sender must send at least its share through all its ports together. On
a flat network both are exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, combinations
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.network import Behind, Rate, all_gather, behind_ports, ring, split_concat
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.planning.hybrid.event_time import Problem

from .device_symmetry import Devices

Floats = NDArray[np.float64]


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


@dataclass
class Relaxed:
    """The least costs of stages of a problem, by their replicas. `must`: whether stages must, must not (False) or may
    (None) recompute."""

    problem: Problem
    rates: Rates
    must: bool | None
    _held: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)

    @property
    def chain(self) -> Chain:
        """The costs of each layer on its fastest device."""
        return self.problem.fast

    @cached_property
    def _kinds(self) -> list[tuple[Chain, int]]:
        """The costs on each kind of device, and how many devices are of it."""
        return [(chain, self.problem.kinds.count(kind)) for kind, chain in self.problem.by_kind.items()]

    def times(self, devices: int) -> tuple[Floats, Floats]:
        """Seconds of stages forward and backward, by end, first layer and replicas. The largest share is that of one of
        r replicas, and the smallest that of another which is no faster than the r-th fastest device."""
        gather = self.gathers(devices)
        return self._times(devices, "forwards") + gather, self._times(devices, "backwards") + 2 * gather

    def _times(self, devices: int, what: str) -> Floats:
        found = between(getattr(self.chain, what)) * self.shares(devices)
        if len(self._kinds) == 1:
            return found
        seconds = np.stack([between(getattr(own, what)) for own, _ in self._kinds])
        order = seconds.argsort(0)
        as_fast = np.array([count for _, count in self._kinds])[order].cumsum(0)  # how many devices are
        kind = (as_fast < np.arange(devices + 1)).sum(0)[None]
        ranked = np.take_along_axis(np.take_along_axis(seconds, order, 0), kind, 0)[0]
        slowest: Floats = ranked * np.array([self._smallest(max(r, 1)) for r in range(devices + 1)])
        return np.maximum(found, slowest)

    def shares(self, devices: int) -> Floats:
        return np.array([self.problem.share(max(r, 1)) for r in range(devices + 1)])

    def _smallest(self, r: int) -> float:
        samples = self.chain.samples
        return 1 / r if samples is None else samples // r / samples

    def ring(self, r: int) -> Rate:
        """The rate of an all-reduce."""
        if r == 1:
            return Rate(0.0, 0.0)
        return Rate(2 * (r - 1) * self.rates.ring_latency, 2 * (r - 1) / r / self.rates.bandwidths[r])

    def gathers(self, devices: int) -> Floats:
        """Seconds of `Problem.gather` for stages, by end, first layer and replicas."""
        if self.problem.optimizer_sharding != "zero3":
            return np.zeros(devices + 1)
        rates = [all_gather(self.ring(max(r, 1))) for r in range(devices + 1)]
        latency, per_byte = map(np.array, zip(*rates, strict=True))
        layers = list(accumulate((layer.parameters > 0 for layer in self.chain.layers), initial=0))
        found: Floats = between(layers) * latency + between(self.chain.parameters) * per_byte
        return found

    def states(self, devices: int) -> Floats:
        """Bytes of `Problem.fixed` for stages, by end, first layer and replicas."""
        problem, n, parameters = self.problem, len(self.chain), between(self.chain.parameters)
        total, layers = self.chain.parameters[-1] or 1, [layer.parameters for layer in self.chain.layers]
        if problem.optimizer_sharding != "zero3":
            each: Floats = np.array([problem.fixed(0, n, max(r, 1)) / total for r in range(devices + 1)])
            return parameters * each
        largest = np.zeros_like(parameters)  # layer, which is gathered
        for a in range(n):
            largest[a + 1 :, a, 0] = np.maximum.accumulate(layers[a:])
        whole = parameters * problem.copies + np.zeros(devices + 1)
        shared = parameters * problem.copies / np.maximum(np.arange(devices + 1), 1) + min(problem.copies, 2) * largest
        found: Floats = np.where(np.arange(devices + 1) > 1, shared, whole)
        return found

    def tails(self, devices: int) -> Floats:
        """Seconds of the all-reduce of stages after the last backward, by end, first layer and replicas."""
        if self.problem.optimizer_sharding == "zero3":
            return np.zeros((len(self.chain) + 1, len(self.chain), devices + 1))
        rings = [self.ring(max(r, 1)) for r in range(devices + 1)]
        latency, per_byte = map(np.array, zip(*rings, strict=True))
        count = between(self.chain.parameters)
        found = np.where(count > 0, latency + count * per_byte, 0.0)
        if self.problem.all_reduce == "end":
            return found
        # Backward, layer by layer: the slower, the less of the all-reduce is left.
        free = ready = np.zeros_like(found[:, 0])
        for a in range(len(self.chain) - 1, -1, -1):
            inside = np.arange(len(found))[:, None] > a
            ready = ready + np.where(inside, self.problem.slow.layers[a].backward * self.shares(devices), 0.0)
            free = np.maximum(free, ready) + np.where(inside, found[a + 1, a], 0.0)
            found[:, a] = free - ready
        return found

    def held(self, first: int, end: int) -> int:
        """The least replicas with which a stage has memory for one micro-batch, remembered; more than there are devices
        if it never has."""
        found = self._held.get((first, end))
        if found is None:
            chain, problem, room = self.chain, self.problem, self.rates.room[1]
            saved = chain.saved[end] - chain.saved[first] + (chain.cuts[first] if self.must else 0.0)

            def fits(r: int) -> bool:  # with ZeRO-3, one device without replicas may hold less than two with one
                held = min(problem.fixed(first, end, r), problem.fixed(first, end, 1))
                return saved * problem.share(r) <= (room - held) * (1 + 1e-9)

            counts = range(1, len(self.rates.room))
            found = self._held[first, end] = 1 + bisect_left(counts, True, key=fits)  # the more, the less each holds
        return found

    def repeats(self, devices: int, ahead: Floats) -> tuple[Floats, Floats]:
        """Whether stages fit in memory, and whether they have to recompute for that, by end, first layer and replicas.
        `ahead`: by end, how many micro-batches they keep."""
        chain, room = self.chain, np.array(self.rates.room[: devices + 1])
        shares = self.shares(devices)
        saved = between(chain.saved) * shares
        left: Any = room - self.states(devices)
        left = left + np.where(room < inf, 1e-9 * room, 0.0)
        cuts = np.array(chain.cuts[: len(chain)])[:, None] * shares
        at_once = (ahead * saved <= left) & (not self.must)
        again = (ahead * cuts + saved <= left) & (self.must is not False)
        fits = (at_once | again) & (np.arange(devices + 1) > 0)
        return fits, ~at_once


def between(sums: Sequence[float]) -> Floats:
    """The sums over the layers of each stage, from running sums: by end and first layer; 0 before it."""
    whole = np.array(sums)
    found: Floats = np.maximum(whole[:, None] - whole[:-1], 0)[..., None]
    return found
