"""Cuts a line of ops into stages so that the slowest stage is as fast as it can be. Exact, and quick for long lines.

n ops lie at positions 0 .. n-1; a cut at p lies before op p. Stage s runs the ops i .. j-1 between two cuts and costs

    load(i, j) = work[j] - work[i] + enter[i] + leave[j]       picoseconds; work is a running sum
    held(i, j) = bytes[j] - bytes[i] + hold[i]                 bytes, at most `room`

All are whole numbers, so the least is exact and the same on every machine. Bisection finds the least T for which the
load of all k stages is at most T. For one T, walk over the stages and keep the cuts that can be reached:

    cut 0    reached = {0}
    cut s    j is reached if some reached i < j has  enter[i] - work[i] <= T - work[j] - leave[j]  and fits in memory

Among the starts i, only the one with the least left side matters. `bytes` never falls as j grows, so a start that no
longer fits in memory never fits again and is dropped: one pass over the positions for each stage. Each T that is
possible also tells which positions a cut can still take, from the front and from the back; only those are tried from
then on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from itertools import pairwise

Cuts = tuple[int, ...]


@dataclass(frozen=True)
class StageCosts:
    """What one stage would cost between any two cuts: the lists of the formulas above, of n + 1 entries each."""

    work: Sequence[int]
    enter: Sequence[int]
    leave: Sequence[int]
    bytes: Sequence[int]
    hold: Sequence[int]
    room: int

    def load(self, i: int, j: int) -> int:
        return self.work[j] - self.work[i] + self.enter[i] + self.leave[j]

    def held(self, i: int, j: int) -> int:
        return self.bytes[j] - self.bytes[i] + self.hold[i]

    def fits(self, i: int, j: int, bound: int) -> bool:
        """Whether the stage between cuts i and j loads at most `bound` and fits in memory."""
        return self.load(i, j) <= bound and self.held(i, j) <= self.room

    def mirrored(self) -> StageCosts:
        """The same stage for the line of ops in reverse order; it holds no more than here."""
        work, bytes = ([sums[-1] - past for past in reversed(sums)] for sums in (self.work, self.bytes))
        nothing = [0] * len(work)
        return StageCosts(work, self.leave[::-1], self.enter[::-1], bytes, nothing, self.room)

    @cached_property
    def starts(self) -> list[tuple[int, int]]:
        """For a stage that starts at i: its load less work[j] + leave[j], and the largest bytes[j] that fits."""
        lists = zip(self.work, self.enter, self.bytes, self.hold, strict=True)
        return [(enter - work, self.room + bytes - hold) for work, enter, bytes, hold in lists]

    @cached_property
    def ends(self) -> list[int]:
        return [work + leave for work, leave in zip(self.work, self.leave, strict=True)]

    @cached_property
    def least_leave(self) -> int:
        return min(self.leave)


def loads(stages: Sequence[StageCosts], cuts: Cuts) -> tuple[int, ...]:
    """The load of each stage between neighbouring cuts."""
    return tuple(stage.load(i, j) for stage, (i, j) in zip(stages, pairwise(cuts), strict=True))


def balance(stages: Sequence[StageCosts], allowed: Sequence[Sequence[int]]) -> Cuts | None:
    """The cuts 0 < c1 < ... < n for which the largest load is least; None if no cuts fit in memory.

    `allowed` has the positions, ascending, that each of the k - 1 inner cuts may take. Every stage has at least one
    op. Of several best answers, one is taken that no move of a single cut makes more even; it is always the same.
    """
    low, high = _lower_bound(stages), _upper_bound(stages)
    best = _within(stages, allowed, high)
    if best is None:
        return None
    high = max(loads(stages, best))
    mirrors = [stage.mirrored() for stage in reversed(stages)]
    near = allowed
    while low < high:
        middle = (low + high) // 2
        found = _within(stages, near, middle)
        if found is None:
            low = middle + 1
        else:
            best, high = found, max(loads(stages, found))
            near = _still_possible(stages, mirrors, near, high)
    return _evened(stages, allowed, best)


def _lower_bound(stages: Sequence[StageCosts]) -> int:
    """A lower bound on the largest load: each op at its fastest, spread evenly, with the cheapest transfers."""
    steps = ([b - a for a, b in pairwise(stage.work)] for stage in stages)
    least: int = sum(map(min, zip(*steps, strict=True)))
    return least // len(stages) + min(min(stage.enter) + stage.least_leave for stage in stages)


def _upper_bound(stages: Sequence[StageCosts]) -> int:
    """An upper bound on the largest load."""
    return max(stage.work[-1] + max(stage.enter) + max(stage.leave) for stage in stages)


def _within(stages: Sequence[StageCosts], allowed: Sequence[Sequence[int]], bound: int) -> Cuts | None:
    """Cuts for which no load is above `bound`, or None."""
    reached = _reached(stages, allowed, bound)
    if not reached[-1]:
        return None
    cuts = [reached[-1][0]]
    for stage, starts in zip(reversed(stages), reversed(reached[:-1]), strict=True):
        before = starts[: bisect_left(starts, cuts[-1])]
        cuts.append(next(i for i in reversed(before) if stage.fits(i, cuts[-1], bound)))
    return tuple(reversed(cuts))


def _still_possible(
    stages: Sequence[StageCosts], mirrors: Sequence[StageCosts], allowed: Sequence[Sequence[int]], bound: int
) -> list[list[int]]:
    """The positions of each inner cut that stages within `bound` reach from the front, and from the back."""
    n = len(stages[0].work) - 1
    front = _reached(stages, allowed, bound)[1:-1]
    backwards = [[n - p for p in reversed(positions)] for positions in reversed(front)]
    back = _reached(mirrors, backwards, bound)[1:-1]
    return [[n - p for p in reversed(positions)] for positions in reversed(back)]


def _reached(stages: Sequence[StageCosts], allowed: Sequence[Sequence[int]], bound: int) -> list[Sequence[int]]:
    """The positions that each cut, the two ends included, can take after stages whose loads are at most `bound`."""
    n = len(stages[0].work) - 1
    reached: list[Sequence[int]] = [(0,)]
    for stage, ends in zip(stages, (*allowed, (n,)), strict=True):
        reached.append(_reach(stage, reached[-1], ends, bound))
    return reached


def _reach(stage: StageCosts, starts: Sequence[int], ends: Sequence[int], bound: int) -> list[int]:
    """The `ends` that the stage can reach from one of the `starts`, within `bound` and its memory."""
    lacks, sums, bytes = stage.starts, stage.ends, stage.bytes
    found: list[int] = []
    open: list[tuple[int, int]] = []  # a heap of starts: the one with the least load first
    at, count = 0, len(starts)
    for j in ends:
        while at < count and starts[at] < j:
            start = lacks[starts[at]]
            if open and start[0] <= open[0][0] and start[1] >= open[0][1]:
                heapreplace(open, start)  # better in both, so the old one is not needed
            else:
                heappush(open, start)
            at += 1
        while open and open[0][1] < bytes[j]:
            heappop(open)
        if open and open[0][0] + sums[j] <= bound:
            found.append(j)
        elif at == count and (not open or open[0][0] + stage.work[j] + stage.least_leave > bound):
            break  # the stage only grows from here
    return found


def _evened(stages: Sequence[StageCosts], allowed: Sequence[Sequence[int]], cuts: Cuts) -> Cuts:
    """Moves one cut after the other to where its two stages are most even, until none moves. The slower of the two
    never gets slower, so the slowest of all does not either."""
    now = list(cuts)
    for _ in range(4 * len(stages)):  # far more rounds than needed
        before = tuple(now)
        for c in range(1, len(stages)):
            now[c] = _most_even(stages[c - 1], stages[c], now[c - 1], now[c + 1], allowed[c - 1])
        if before == tuple(now):
            break
    return tuple(now)


def _most_even(left: StageCosts, right: StageCosts, i: int, j: int, allowed: Sequence[int]) -> int:
    between = allowed[bisect_right(allowed, i) : bisect_left(allowed, j)]
    fitting = (p for p in between if left.held(i, p) <= left.room and right.held(p, j) <= right.room)

    def cost(p: int) -> tuple[int, int, int]:
        first, second = left.load(i, p), right.load(p, j)
        return max(first, second), first + second, p

    return min(fitting, key=cost)
