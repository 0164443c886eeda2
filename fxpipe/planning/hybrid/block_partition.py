"""The balances of GPipe and torchgpipe: a line of costs, cut into blocks, without a look at transfers or memory.

torchgpipe makes the largest block as small as can be; whether that is by time or by size depends on the costs it is
given. GPipe's heuristic makes the variance of the blocks small. Both are exact here. They differ:

    costs 9 1 1 1 1 in 3 blocks    the largest block is 9 wherever the ones are cut
                                   the variance is least at 9 | 1 1 | 1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from fxpipe.errors import PlanError
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.planning.stages.balance import StageCosts, balance

WHOLE = 10**12  # costs are compared to this share of their sum


def by_time(chain: Chain, blocks: int) -> tuple[int, ...]:
    """Layers per block, the slowest block as fast as can be."""
    return smallest_largest([layer.forward + layer.backward for layer in chain.layers], blocks)


def by_size(chain: Chain, blocks: int, copies: float = 2, batch_parts: int = 1) -> tuple[int, ...]:
    """Layers per block, the fullest block as empty as can be: parameters, each `copies` times, and the activations of
    as many micro-batches as wait."""
    sizes = [layer.parameters * copies + layer.saved * batch_parts for layer in chain.layers]
    return smallest_largest(sizes, blocks)


def smallest_largest(costs: Sequence[float], blocks: int) -> tuple[int, ...]:
    """How many costs each block has, for which the largest sum is least; of those, one that is even.

    >>> smallest_largest([2, 1, 1, 3, 1, 4], 3)
    (3, 2, 1)
    """
    n = _enough(costs, blocks)
    total = sum(costs) or 1.0
    work = [round(cost / total * WHOLE) for cost in accumulate(costs, initial=0.0)]
    none = [0] * (n + 1)
    cuts = balance([StageCosts(work, none, none, none, none, 0)] * blocks, [range(1, n)] * (blocks - 1))
    if cuts is None:
        raise AssertionError("nothing bounds these cuts")
    return tuple(b - a for a, b in pairwise(cuts))


def least_variance(costs: Sequence[float], blocks: int) -> tuple[int, ...]:
    """How many costs each block has, for which the variance of the sums is least.

    >>> least_variance([9, 1, 1, 1, 1], 3)
    (1, 2, 2)
    """
    n = _enough(costs, blocks)
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
    """For each end the least sum of squares with one more block, and where that starts. The later the end, the later
    the start: so the middle end is solved first and halves the starts for those on either side."""
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


def _enough(costs: Sequence[float], blocks: int) -> int:
    if not 1 <= blocks <= len(costs):
        raise PlanError(f"{len(costs)} layers cannot be cut into {blocks} blocks")
    return len(costs)
