"""The least costs of stages that may each choose a way to cut their ops, over all placements.

A table over numbers of replicas becomes one over *options*: every way with every number of its groups.

    way 0, single devices    replicas  1 2 3 4      devices  1 2 3 4
    way 1, groups of two     replicas  1 2          devices  2 4

Of whole samples, more replicas need not be faster: of 4 samples the largest share is 2 with 2 replicas and with 3. If
devices are of one kind and each replica keeps all of its state, the fewest replicas of a share are as good as any more,
so only they are options.

Each option is of a single way, and nothing is lost where stages mix ways. Only a transfer between stages of different
ways is bounded from both of its ends by itself: each device of the later stage takes what it needs through its ports,
and the devices of the earlier stage send that through theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fxpipe.planning.hybrid.event_time import Problem, least_work_of

from .relaxed_cluster import Floats, Relaxed


@dataclass
class RelaxedWays:
    """The least costs in each way, with the devices of a group, on `devices` devices in all."""

    ways: tuple[Relaxed, ...]
    degrees: tuple[int, ...]
    devices: int
    _sent: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)

    @property
    def problem(self) -> Problem:
        """The problem of the first way: all have the same layers, micro-batches and order of work."""
        return self.ways[0].problem

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """How many groups there are in each way."""
        return tuple(len(one.problem.cluster.devices) for one in self.ways)

    @cached_property
    def each(self) -> tuple[NDArray[np.int64], ...]:
        """Of each way the replicas of its options."""
        return tuple(_worth_trying(one, count) for one, count in zip(self.ways, self.groups, strict=True))

    @cached_property
    def replicas(self) -> NDArray[np.int64]:
        """The replicas of each option."""
        return np.concatenate(self.each)

    @cached_property
    def way(self) -> NDArray[np.int64]:
        """The way of each option."""
        return np.repeat(np.arange(len(self.ways)), [len(own) for own in self.each])

    @cached_property
    def option(self) -> list[list[int]]:
        """By way and replicas, the option that stands for them."""
        counts = [
            np.searchsorted(own, np.arange(n + 1), "right") for own, n in zip(self.each, self.groups, strict=True)
        ]
        return [(start + np.maximum(own - 1, 0)).tolist() for start, own in zip(self.starts, counts, strict=True)]

    @cached_property
    def width(self) -> NDArray[np.int64]:
        """The devices of each option."""
        found: NDArray[np.int64] = self.replicas * np.array(self.degrees)[self.way]
        return found

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first option of each way."""
        return tuple(np.cumsum([0, *(len(own) for own in self.each[:-1])]).tolist())

    @cached_property
    def shares(self) -> Floats:
        """The largest share of a micro-batch of each option."""
        known = zip(self.ways, self.groups, self.each, strict=True)
        return np.concatenate([one.shares(count)[own] for one, count, own in known])

    @cached_property
    def latency(self) -> float:
        """The least seconds of a transfer."""
        return min(one.rates.latency for one in self.ways)

    @cached_property
    def layer_work(self) -> Floats:
        """Of each layer the least seconds, forward and backward, times the devices that it is on."""
        every = [degree * _seconds(one) for degree, one in zip(self.degrees, self.ways, strict=True)]
        least: Floats = np.min(every, 0)
        return least

    @cached_property
    def least_work(self) -> float:
        """Seconds that no step takes less than: all of its work, shared by all devices without a loss."""
        return least_work_of([one.problem for one in self.ways], self.degrees, self.devices)

    @cached_property
    def rest(self) -> Floats:
        """By layer and most devices, the least seconds of a micro-batch from this layer on, forward and backward."""
        g = np.arange(self.devices + 1)
        found = []
        for degree, one, count in zip(self.degrees, self.ways, self.groups, strict=True):
            found.append(_seconds(one)[:, None] * one.shares(count)[np.minimum(g // degree, count)])
        sums = np.min(found, 0)[::-1].cumsum(0)[::-1]
        return np.vstack([sums, np.zeros_like(sums[:1])])

    def crossings(self, cut: int) -> Floats:
        """Seconds of one transfer, by options before and after."""
        found = np.zeros((len(self.way), len(self.way)))
        for v, w in product(range(len(self.ways)), repeat=2):
            count = self.ways[w].chain.cuts[cut]
            if count:
                mine, theirs = self._options(v), self._options(w)
                sent = count * self.sent(v, w) * self.shares[mine][:, None]
                taken = count * self.ways[w].rates.share * self.shares[theirs]
                found[mine, theirs] = self.latency + np.maximum(sent, taken)
        return found

    def sent(self, v: int, w: int) -> float:
        """The least seconds with which a replica of the way v gives one of the way w a byte for each of its devices. In
        a smaller group each device serves several; of a larger one only as many send as the other group has."""
        key = (v, w)
        if key not in self._sent:
            few = min((v, w), key=lambda way: self.degrees[way])
            self._sent[key] = self.ways[few].rates.share * max(1, self.degrees[w] / self.degrees[v])
        return self._sent[key]

    def given(self, v: int, cut: int) -> float:
        """The least seconds with which a replica of the way v gives what it has made before a cut to any way."""
        return min(one.chain.cuts[cut] * self.sent(v, w) for w, one in enumerate(self.ways))

    def _options(self, way: int) -> slice:
        return slice(self.starts[way], self.starts[way] + len(self.each[way]))


def _worth_trying(one: Relaxed, most: int) -> NDArray[np.int64]:
    """The numbers of replicas, up to `most`, that are options."""
    every, problem = np.arange(1, most + 1), one.problem
    if len(problem.by_kind) > 1 or problem.optimizer_sharding != "none":
        return every
    shares = one.shares(most)
    found: NDArray[np.int64] = every[(every == 1) | (shares[1:] < shares[:-1])]
    return found


def _seconds(one: Relaxed) -> Floats:
    return np.array([layer.forward + layer.backward for layer in one.chain.layers])
