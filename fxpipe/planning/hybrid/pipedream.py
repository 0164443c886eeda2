"""PipeDream's planner (section 3.2), for comparison: it balances the steady state and ignores warm-up and end.

PipeDream keeps the pipe full by training with several versions of the weights, so a step costs what its slowest part
costs: a stage (its compute or its all-reduce, whichever takes longer, shared by its replicas) or a transfer. Dynamic
programming finds the least, level by level of the network:

    best(j, m) = min over i, r of  max(best(i, m - r), 2 cut(i) / bandwidth, stage(i, j, r))
    stage(i, j, r) = max(work(i, j) + inner all-reduce, 2 (r - 1) parameters(i, j) / bandwidth) / r

Levels go from the devices within a server up: the best of a level for layers i .. j on all of its devices is one worker
of the level above. In synchronous training the same plan also pays for warm-up and end, and each replica for its own
micro-batch; a comparison shows how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from fxpipe.ir.plan.hybrid_plan import HybridStage
from fxpipe.ir.plan.layer_chain import Chain


@dataclass(frozen=True)
class Level:
    """`count` workers that a network joins at `bandwidth` bytes per second."""

    count: int
    bandwidth: float


Shape = tuple[HybridStage, ...]  # the stages of one worker, whose devices are numbered from 0


def pipedream(chain: Chain, levels: Sequence[Level]) -> tuple[HybridStage, ...]:
    """The stages of PipeDream's best plan on all devices, numbered so that those of a level are neighbours.

    >>> from fxpipe.ir.plan.layer_chain import Layer
    >>> alike = Chain("m", 1, (Layer("a", 1, 1), Layer("b", 1, 1, parameters=100)))
    >>> [stage.devices for stage in pipedream(alike, [Level(2, 10.0)])]
    [(0,), (1,)]
    """
    n = len(chain)
    work = [f + b for f, b in zip(chain.forwards, chain.backwards, strict=True)]
    cost: dict[tuple[int, int], tuple[float, Shape]] = {
        (i, j): (work[j] - work[i], (HybridStage(i, j, (0,)),)) for i in range(n) for j in range(i + 1, n + 1)
    }
    size = 1
    for depth, level in enumerate(levels):
        top = depth == len(levels) - 1
        starts = [0] if top else range(n)
        cost = {key: found for i in starts for key, found in _level(chain, cost, level, size, i).items()}
        size *= level.count
    return cost[0, n][1]


def _level(
    chain: Chain, cost: dict[tuple[int, int], tuple[float, Shape]], level: Level, size: int, start: int
) -> dict[tuple[int, int], tuple[float, Shape]]:
    """For each end: seconds and stages of the layers from `start` on, on all workers of this level, each of `size`
    devices."""
    n, parameters = len(chain), chain.parameters
    best: dict[tuple[int, int], tuple[float, int, int]] = {}  # (end, workers): seconds, where the last stage starts, r
    for j in range(start + 1, n + 1):
        for m in range(1, level.count + 1):
            seconds, at, replicas = inf, start, m
            for i in range(start, j):
                transfer = 2 * chain.cuts[i] / level.bandwidth if i > start else 0.0
                own, held = cost[i, j][0], parameters[j] - parameters[i]
                for r in [m] if i == start else range(1, m):
                    stage = max(own, 2 * (r - 1) * held / level.bandwidth) / r
                    before = best[i, m - r][0] if i > start else 0.0
                    whole = max(before, transfer, stage)
                    if whole < seconds:
                        seconds, at, replicas = whole, i, r
            best[j, m] = seconds, at, replicas
    return {
        (start, j): (best[j, level.count][0], _shape(best, cost, start, j, level.count, size))
        for j in range(start + 1, n + 1)
    }


def _shape(
    best: dict[tuple[int, int], tuple[float, int, int]],
    cost: dict[tuple[int, int], tuple[float, Shape]],
    start: int,
    j: int,
    m: int,
    size: int,
) -> Shape:
    """The stages that a level has chosen for m workers: each replica of a worker has all of the worker's stages."""
    stages: list[HybridStage] = []
    while j > start:
        _, i, r = best[j, m]
        bases = range((m - r) * size, m * size, size)
        own = (replace(e, devices=tuple(base + d for base in bases for d in e.devices)) for e in cost[i, j][1])
        stages = [*own, *stages]
        j, m = i, m - r
    return tuple(stages)
