"""Plans without a search: data parallelism, and plain pipelines with a device for each stage. Any other plan has to
beat them.

Data parallelism is a pipeline of one stage. Its micro-batches only bound memory (gradient accumulation), so the largest
that fits is best.

There are two plain pipelines: torchgpipe makes the slowest stage as fast as possible, GPipe's heuristic makes the
variance of the stages' times least. Both are exact here, and ignore transfers and memory. They differ:

    costs 9 1 1 1 1 in 3 blocks    the largest block is 9 wherever the ones are cut
                                   the variance is least at 9 | 1 1 | 1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import HybridStage
from fxpipe.planning.stages.balance import StageCosts, balance

from .event_time import Problem

PICOSECONDS = 1e12


def whole(problem: Problem) -> tuple[HybridStage, ...]:
    """One stage of all layers on all devices."""
    return (HybridStage(0, len(problem.chain), tuple(range(len(problem.cluster.devices)))),)


def one_each(problem: Problem) -> tuple[HybridStage, ...]:
    """The plain pipeline with the fastest slowest stage. Raises PlanError for fewer layers than devices."""
    n, k = len(problem.chain), _enough(problem)
    work = {
        kind: [round((f + b) * PICOSECONDS) for f, b in zip(own.forwards, own.backwards, strict=True)]
        for kind, own in problem.by_kind.items()
    }
    none = [0] * (n + 1)
    cuts = balance(
        [StageCosts(work[kind], none, none, none, none, 0) for kind in problem.kinds], [range(1, n)] * (k - 1)
    )
    if cuts is None:
        raise AssertionError("nothing bounds these cuts")
    return tuple(HybridStage(cuts[s], cuts[s + 1], (s,)) for s in range(k))


def gpipe(problem: Problem) -> tuple[HybridStage, ...]:
    """The plain pipeline with the least variance of stage times, if all devices were as slow as the slowest. Raises
    PlanError for fewer layers than devices."""
    sizes = least_variance([layer.forward + layer.backward for layer in problem.slow.layers], _enough(problem))
    ends = pairwise(accumulate(sizes, initial=0))
    return tuple(HybridStage(first, end, (s,)) for s, (first, end) in enumerate(ends))


def _enough(problem: Problem) -> int:
    """The number of devices. Raises PlanError if there are fewer layers."""
    layers, devices = len(problem.chain), len(problem.cluster.devices)
    if devices > layers:
        raise PlanError(f"{problem.chain.model} has {layers} layers: they cannot be cut into {devices} stages")
    return devices


def least_variance(costs: Sequence[float], blocks: int) -> tuple[int, ...]:
    """The sizes of blocks of consecutive costs for which the variance of the blocks' sums is least.

    >>> least_variance([9, 1, 1, 1, 1], 3)
    (1, 2, 2)
    """
    n = len(costs)
    sums = list(accumulate(costs, initial=0.0))
    best, starts = [0.0] + [inf] * n, []
    for block in range(1, blocks + 1):
        best, start = _one_more(sums, best, block)
        starts.append(start)
    sizes, end = [], n
    for start in reversed(starts):
        sizes.append(end - start[end])
        end = start[end]
    return tuple(reversed(sizes))


def _one_more(sums: Sequence[float], before: Sequence[float], block: int) -> tuple[list[float], list[int]]:
    """For each end the least sum of squares with one more block, and where that block starts. The later the end, the
    later the start (divide and conquer): the middle end is solved first, and bounds the starts of the others."""
    n = len(sums) - 1
    best, start = [inf] * (n + 1), [0] * (n + 1)
    todo = [(block, n, block - 1, n - 1)]
    while todo:
        low, high, first, last = todo.pop()
        if low > high:
            continue
        end = (low + high) // 2
        for i in range(first, min(end - 1, last) + 1):
            cost = before[i] + (sums[end] - sums[i]) ** 2
            if cost < best[end]:
                best[end], start[end] = cost, i
        todo += [(low, end - 1, first, start[end]), (end + 1, high, start[end], last)]
    return best, start
