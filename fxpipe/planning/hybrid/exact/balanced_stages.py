"""Straight pipelines that fit in memory: stages of given numbers of devices, cut such that the slowest one is fastest.

    layers    1 1 1 1 1 1 1 1     stage 0 has memory for two layers, as it keeps most micro-batches
    stages    1 1|1 1 1|1 1 1     the slowest takes 3 and not 4; even stages of 8/3 would not fit

For a limit on the seconds of a stage, each stage in turn takes as many layers as it can, which shows whether the limit
can be held; the least such limit is found by bisection. Of the cuts that hold it those are taken that are most even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fxpipe.ir.plan.hybrid_plan import warmup_of
from fxpipe.planning.hybrid.event_time import Devices, Problem, Replica

CLOSE = 1.002  # the limit is found to this factor
FAR = 16.0  # if the slowest stage must take this many times as long as an even one, there is no plan worth trying


@dataclass(frozen=True)
class _Stage:
    """A stage of which the layers are not known yet.

    - `count`: how many devices it has.
    - `replicas`: as in `Problem.replicas`.
    - `share`: the largest share of a micro-batch that a replica has.
    - `ahead`: the forwards before its first backward.
    - `room`: bytes of memory.
    """

    count: int
    replicas: tuple[Replica, ...]
    share: float
    ahead: int
    room: float


@dataclass(frozen=True)
class Balance:
    """The ends of stages, and the seconds that the slowest one takes for a micro-batch."""

    ends: tuple[int, ...]
    seconds: float


def balanced(problem: Problem, devices: Sequence[Devices], recompute: bool | None) -> Balance | None:
    """The balance of a pipeline whose stages are on these devices; None if it would not fit in memory. Stages that do
    not fit without recomputation recompute, if they may."""
    found = _Balancing(problem, tuple(_stages(problem, devices)), recompute)
    low = high = even_seconds(problem, [len(own) for own in devices])
    if found.latest(FAR * high) is None:
        return None
    while (ends := found.latest(high)) is None:
        low, high = high, high * 1.25
    while high > low * CLOSE:
        middle = (low + high) / 2
        better = found.latest(middle)
        low, high, ends = (low, middle, better) if better else (middle, high, ends)
    return Balance(found.even(ends, high), high)


def even_seconds(problem: Problem, counts: Sequence[int]) -> float:
    """What the slowest of stages of these numbers of devices takes at least for a micro-batch: an even part."""
    work = problem.fast.forwards[-1] + problem.fast.backwards[-1]
    return work / sum(1 / problem.share(count) for count in counts)


def in_order(counts: Sequence[int]) -> list[Devices]:
    """The devices of stages of these numbers of devices, in the order of the cluster.

    >>> in_order([2, 1])
    [(0, 1), (2,)]
    """
    return [tuple(range(end - count, end)) for count, end in zip(counts, accumulate(counts), strict=True)]


def _stages(problem: Problem, devices: Sequence[Devices]) -> list[_Stage]:
    found = []
    for s, own in enumerate(devices):
        room = min(problem.cluster.devices[device].memory for device in own) if problem.capped else float("inf")
        ahead = warmup_of(problem.warmup, s, len(devices), problem.micro_batches)
        found.append(_Stage(len(own), problem.replicas(own), problem.share(len(own)), ahead, room))
    return found


@dataclass(frozen=True)
class _Balancing:
    problem: Problem
    stages: tuple[_Stage, ...]
    recompute: bool | None

    def holds(self, stage: _Stage, first: int, end: int, limit: float) -> bool:
        """Whether a stage of these layers takes at most `limit` seconds, and fits in memory."""
        problem, chain = self.problem, self.problem.chain
        forward = max((own.forwards[end] - own.forwards[first]) * part for own, part in stage.replicas)
        both = forward + max((own.backwards[end] - own.backwards[first]) * part for own, part in stage.replicas)
        fixed = problem.fixed(first, end, stage.count)
        saved = (chain.saved[end] - chain.saved[first]) * stage.share
        if self.recompute is not True and both <= limit and fixed + stage.ahead * saved <= stage.room:
            return True
        kept = stage.ahead * chain.cuts[first] * stage.share + saved
        return self.recompute is not False and both + forward <= limit and fixed + kept <= stage.room

    def latest(self, limit: float) -> tuple[int, ...] | None:
        """The latest ends of all stages, None if some stage would not hold the limit."""
        n, k = len(self.problem.chain), len(self.stages)
        ends, first = [], 0
        for s, stage in enumerate(self.stages):
            end = self._farthest(stage, first, n - (k - 1 - s), limit)
            if end == first:
                return None
            ends.append(end)
            first = end
        return tuple(ends) if first == n else None

    def _farthest(self, stage: _Stage, first: int, most: int, limit: float) -> int:
        low, high = first, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.holds(stage, first, middle, limit) else (low, middle - 1)
        return low

    def _nearest(self, stage: _Stage, end: int, least: int, limit: float) -> int:
        """The first layer at which a stage up to `end` can start."""
        low, high = least, end
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.holds(stage, middle, end, limit) else (middle + 1, high)
        return low

    def even(self, latest: Sequence[int], limit: float) -> tuple[int, ...]:
        """Of the ends that hold the limit, those that share out the seconds most evenly. `latest` are the latest."""
        chain, k = self.problem.slow, len(self.stages)
        done = [f + b for f, b in zip(chain.forwards, chain.backwards, strict=True)]
        earliest = [latest[-1]]  # of the cuts, from the last
        for s in range(k - 1, 0, -1):
            earliest.append(self._nearest(self.stages[s], earliest[-1], s, limit))
        ends, first = [], 0
        for s in range(k - 1):
            speeds = [1 / stage.share for stage in self.stages[s:]]
            target = done[first] + (done[-1] - done[first]) * speeds[0] / sum(speeds)
            low, high = max(earliest[k - 1 - s], first + 1), latest[s]
            high = max(low, min(high, self._farthest(self.stages[s], first, high, limit)))
            first = min(range(low, high + 1), key=lambda p: abs(done[p] - target))
            ends.append(first)
        return (*ends, latest[-1])
