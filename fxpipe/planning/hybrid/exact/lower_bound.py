"""Lower bounds on the cost of the stages before a cut, whatever they are: tables for every cut and number of devices.

A chain of events that must follow each other takes no longer than the step. Take stage p:

    arrive     the first micro-batch comes to p           forward and transfer of each stage before
    work       p runs all micro-batches                   M x (forward + backward)
    leave      the last gradient goes back and each       backward and transfer of each stage before, and
               stage it reaches adds up its gradients     its all-reduce; or that of p itself

So a step takes at least arrive + work + leave, for each p, and likewise for each transfer. The stages before a cut
affect those after it only by `arrive` and `through` = arrive + leave. Both are sums over stages. Dynamic programming
over (layers, devices, replicas of the last stage) gives the least value of each, one by one: a relaxation, but a tight
one. A third column, `own`, is the least of the largest arrive + work + leave of the stages before the cut.

Stages whose arrive + work + leave is `limit` or more are left out, because only plans below `limit` are looked for. The
lower the limit, the higher the tables; if no stages are left, no plan is below it. `root` looks for the highest limit
that can be refuted so. The stages of least `through` are good plans, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import NamedTuple

from fxpipe.ir.plan.hybrid_plan import warmup_of

from .relaxed_cluster import Relaxed

Table = list[list[list[float]]]  # by cut, most devices before it, and replicas of the stage after it
End = tuple[float, float, float]  # the three columns, before the transfer
Sizes = tuple[tuple[int, int], ...]  # the end and the replicas of each stage


class Part(NamedTuple):
    """What a stage of layers `first` to b - 1 with r replicas adds to the chains of events, at least, in seconds.

    - `forward`: of one micro-batch.
    - `both`: forward and backward of one micro-batch.
    - `work`: of all micro-batches, recomputation included.
    - `tail`: of the all-reduce after the last backward.
    """

    first: int
    forward: float
    both: float
    work: float
    tail: float


Parts = list[list[list[Part]]]  # by end and replicas


@dataclass
class Tables:
    """The columns above for the stages before each cut and the transfer across it.

    - `total`: the least of whole plans, in seconds.
    - `sizes`: the plan that the choices lead to.
    - `last`, `starts`, `before`: the choices.
    """

    limit: float
    arrive: Table
    through: Table
    own: Table
    total: float = inf
    sizes: Sizes = ()
    last: tuple[int, int] = (0, 0)
    starts: dict[tuple[int, int, int], int] = field(default_factory=dict)
    before: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)


def parts(relaxed: Relaxed, devices: int) -> Parts:
    """All stages that fit in memory, by end and replicas."""
    n = len(relaxed.chain)
    return [[list(_parts(relaxed, b, r)) if b and r else [] for r in range(devices + 1)] for b in range(n + 1)]


def _parts(relaxed: Relaxed, b: int, r: int) -> Iterator[Part]:
    problem, chain = relaxed.problem, relaxed.chain
    m = problem.micro_batches
    ahead = 1 if b == len(chain) else warmup_of(problem.warmup, 0, 2, m)
    rate, share, slow = relaxed.ring(r), problem.share(r), problem.slow
    free = ready = 0.0
    for a in range(b - 1, -1, -1):
        forward, backward = relaxed.times(a, b, r)
        both = forward + backward
        if problem.all_reduce == "end" or r == 1:
            tail = rate.seconds(chain.parameters[b] - chain.parameters[a])
        else:
            ready += slow.layers[a].backward * share  # the slower, the less of the all-reduce is left
            free = max(free, ready) + rate.seconds(chain.layers[a].parameters)
            tail = free - ready
        again = relaxed.repeats(a, b, r, ahead)
        if again is not None:
            yield Part(a, forward, both, m * (both + (forward if again else 0.0)), tail)


class OutOfTime(Exception):
    """The search has used up its nodes or its time."""


def tables(relaxed: Relaxed, parts: Parts, devices: int, limit: float, until: float) -> Tables:
    """The tables for up to this many devices. Raises OutOfTime at `until`, by `perf_counter`."""
    n = len(relaxed.chain)
    made = Tables(limit, _column(n, devices), _column(n, devices), _column(n, devices))
    for b in range(1, n):
        if perf_counter() > until:
            raise OutOfTime
        ends = [
            [_end(made, parts[b][r], b, g, r) if 0 < r <= g else None for r in range(g + 1)] for g in range(devices)
        ]
        _cross(relaxed, made, b, devices, ends)
    for r in range(1, devices + 1):
        end = _end(made, parts[n][r], n, devices, r)
        if end is not None and end[2] < made.total:
            made.total, made.last = end[2], (devices, r)
    made.sizes = _sizes(made, n)
    return made


def _column(n: int, devices: int) -> Table:
    """A column to fill: 0 before the first layer, inf (not known yet) before all others."""
    size = range(devices + 1)
    return [[[inf if cut else 0.0 for _ in size] for _ in size] for cut in range(n)]


def _end(made: Tables, fitting: list[Part], b: int, g: int, r: int) -> End | None:
    """The columns for all stages before cut b on at most g devices, if the last of them has r replicas."""
    arrive, through, own, limit = made.arrive, made.through, made.own, made.limit
    left, start = g - r, -1
    least_arrive = least_through = least_own = inf
    for first, forward, both, work, tail in fitting:
        arrived, way = arrive[first][left][r], through[first][left][r]
        if arrived + tail > way:
            way = arrived + tail
        most = own[first][left][r]
        if way + work > most:
            most = way + work
        if most >= limit:
            continue
        if arrived + forward < least_arrive:
            least_arrive = arrived + forward
        if way + both < least_through:
            least_through, start = way + both, first
        if most < least_own:
            least_own = most
    if start < 0:
        return None
    made.starts[b, g, r] = start
    return least_arrive, least_through, least_own


def _cross(relaxed: Relaxed, made: Tables, b: int, devices: int, ends: list[list[End | None]]) -> None:
    """Fill the columns of cut b: those of all stages before it, with the transfer to a stage of q replicas."""
    chain, m = relaxed.chain, relaxed.problem.micro_batches
    rest = chain.forwards[-1] - chain.forwards[b] + chain.backwards[-1] - chain.backwards[b]
    for q in range(1, devices):
        seconds = [relaxed.crossing(b, max(r, 1), q) for r in range(devices)]
        arrive, through, own = made.arrive[b], made.through[b], made.own[b]
        for g in range(1, devices - q + 1):
            least_arrive, least_through, least_own = arrive[g - 1][q], through[g - 1][q], own[g - 1][q]
            choice = made.before.get((b, g - 1, q))
            after = rest * relaxed.problem.share(devices - g)
            for r in range(1, g + 1):
                end = ends[g][r]
                if end is None:
                    continue
                across = seconds[r]
                most = max(end[2], end[1] + (m + 1) * across + after)
                if most >= made.limit:
                    continue
                if end[0] + across < least_arrive:
                    least_arrive = end[0] + across
                if end[1] + 2 * across < least_through:
                    least_through, choice = end[1] + 2 * across, (g, r)
                if most < least_own:
                    least_own = most
            arrive[g][q], through[g][q], own[g][q] = least_arrive, least_through, least_own
            if choice is not None:
                made.before[b, g, q] = choice


def _sizes(made: Tables, n: int) -> Sizes:
    """The plan that the choices lead to, from the last stage back."""
    if made.total == inf:
        return ()
    b, (g, r), found = n, made.last, []
    while True:
        found.append((b, r))
        first = made.starts[b, g, r]
        if first == 0:
            return tuple(reversed(found))
        b, (g, r) = first, made.before[first, g - r, r]


def root(
    relaxed: Relaxed, parts: Parts, devices: int, low: float, high: float, steps: int, until: float
) -> tuple[float, list[Sizes]]:
    """A lower bound on all plans that take less than `high`, by bisection from the known bound `low`, and the plans met
    on the way. It ends at `until`, by `perf_counter`."""
    found: list[Sizes] = []
    for _ in range(steps):
        if low >= high * (1 - 1e-4):
            break
        middle = (low + high) / 2
        try:
            made = tables(relaxed, parts, devices, middle, until)
        except OutOfTime:
            break
        if made.total == inf:
            low = middle
        else:
            found.append(made.sizes)
            low, high = max(low, made.total), middle
    return low, found
