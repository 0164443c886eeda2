"""Moves cuts a little, to where a reader would have put them.

The exact balance only sees times, which are estimates or noisy measurements. A stage that is two percent slower than
the best costs nothing that can be measured, but often a cut then lies between two of the user's modules instead of
within an expression, or where one value crosses instead of two.

    x = x + self.attention(...)          x = x + self.attention(...)
    ---- two values cross ----
    x = x + self.mlp(x)           ▶      x = x + self.mlp(x)
                                         ---- one value crosses ----
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from fxpipe.ir.graph.graph import Graph, Op

from .balance import Cuts, StageCosts, loads

Ugliness = tuple[int, int]


def ugliness(graph: Graph, crossing: Sequence[int]) -> list[Ugliness]:
    """For each position of a cut (the bytes that cross there, the `depth` in the user's code); less is better."""
    inside = [0, *(depth(a, b) for a, b in pairwise(graph.ops)), 0]
    return list(zip(crossing, inside, strict=True))


def depth(before: Op, after: Op) -> int:
    """How many modules two neighbouring ops share, and one more if they come from the same line."""
    shared = 0
    for a, b in zip(before.origin.module.split("."), after.origin.module.split("."), strict=False):
        if a != b:
            break
        shared += 1
    same_line = (before.origin.file, before.origin.line) == (after.origin.file, after.origin.line)
    return shared + same_line


def settle(
    stages: Sequence[StageCosts],
    allowed: Sequence[Sequence[int]],
    cuts: Cuts,
    ugly: Sequence[Ugliness],
    slack: float,
) -> Cuts:
    """The cuts, moved one after the other to the least ugly position between their neighbours, until none moves. No
    stage gets slower than the slowest stage was by more than the share `slack`, and all stages fit in memory."""
    bound = int(max(loads(stages, cuts)) * (1 + slack))
    now = list(cuts)
    for _ in range(4 * len(stages)):
        before = tuple(now)
        for c in range(1, len(stages)):
            now[c] = _least_ugly(stages[c - 1], stages[c], now[c - 1], now[c + 1], allowed[c - 1], ugly, bound)
        if before == tuple(now):
            break
    return tuple(now)


def _least_ugly(
    left: StageCosts,
    right: StageCosts,
    i: int,
    j: int,
    allowed: Sequence[int],
    ugly: Sequence[Ugliness],
    bound: int,
) -> int:
    between = allowed[bisect_right(allowed, i) : bisect_left(allowed, j)]
    fitting = (p for p in between if left.fits(i, p, bound) and right.fits(p, j, bound))
    return min(fitting, key=lambda p: (ugly[p], max(left.load(i, p), right.load(p, j)), p))
