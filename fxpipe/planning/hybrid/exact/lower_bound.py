"""Lower bounds on the cost of the stages before a cut, whatever they are: tables for every cut and number of devices.

A chain of events that must follow each other takes no longer than the step. Take stage p:

    arrive     the first micro-batch comes to p           forward and transfer of each stage before
    work       p runs all micro-batches                   M x (forward + backward)
    leave      the last gradient goes back and each       backward and transfer of each stage before, and
               stage it reaches adds up its gradients     its all-reduce; or that of p itself

So a step takes at least arrive + work + leave, for each p, and likewise for each transfer. The stages before a cut
affect those after it only by `arrive` and `through` = arrive + leave. Both are sums over stages. Dynamic programming
over (layers, devices, option of the last stage) gives the least value of each, one by one: a relaxation, but a tight
one. An option is a way with a number of replicas, see `relaxed_ways.py`. A third column, `own`, is the least of the
largest arrive + work + leave of the stages before the cut.

Stages whose arrive + work + leave is `limit` or more are left out, because only plans below `limit` are looked for. The
lower the limit, the higher the tables; if no stages are left, no plan is below it. `root` looks for the highest limit
that can be refuted so. The stages of least `through` are good plans, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir.plan.hybrid_plan import warmup_of

from .relaxed_cluster import Floats, Relaxed
from .relaxed_ways import RelaxedWays
from .shape_costs import Sizes

Ints = NDArray[np.int64]
First = tuple[int, float, float, float]  # a layer, and the columns for the stages before it


class Parts(NamedTuple):
    """What stages add to the chains of events, at least, in seconds: by the stage's end, first layer and option.

    - `forward`: of one micro-batch.
    - `both`: forward and backward of one micro-batch.
    - `work`: of all micro-batches, recomputation included; infinite if the stage does not fit in memory.
    - `tail`: of the all-reduce after the last backward.
    """

    forward: Floats
    both: Floats
    work: Floats
    tail: Floats


class Ends(NamedTuple):
    """The columns for all stages before a cut, before the transfer: by most devices before the cut, and option of the
    stage before it. `start`: its first layer."""

    arrive: Floats
    through: Floats
    own: Floats
    start: Ints


@dataclass
class Tables:
    """The columns above for the stages before each cut and the transfer across it: by cut, most devices before it, and
    option of the stage after it. 0 before the first layer, infinite where no stages are left.

    - `last`: the columns for all layers.
    - `starts`: by end, devices and option of a stage, its first layer.
    - `before`: by cut, devices and option of the stage after it: the devices and the option of the stage before it.
    """

    relaxed: RelaxedWays
    columns: tuple[Floats, Floats, Floats]
    last: Ends
    starts: list[Ints]
    before: list[tuple[Ints, Ints]]

    def firsts(self, end: int, free: int, option: int, done: float, finish: float, limit: float) -> list[First]:
        """The first layers with which a stage of this end and option can be part of a plan below `limit`, whatever it
        costs, the last one first. `free`: the devices for the stages before it. `done`, `finish`: those of the stages
        after it, as in `shape_costs.before`."""
        arrive, through, own = (column[:end, free, option] for column in self.columns)
        kept = np.flatnonzero((arrive + finish < limit) & (through + done < limit) & (own < limit))[::-1]
        return list(zip(*(each.tolist() for each in (kept, arrive[kept], through[kept], own[kept])), strict=True))

    @cached_property
    def total(self) -> float:
        """The least of whole plans, in seconds."""
        return float(self.last.own[-1].min())

    @property
    def sizes(self) -> Sizes:
        """The plan that the choices lead to, from the last stage back."""
        if self.total == inf:
            return ()
        b, g, width = len(self.starts), len(self.last.own) - 1, self.relaxed.width
        o = int(self.last.own[g].argmin())
        first, found = int(self.last.start[g, o]), [(b, o)]
        while first:
            b, (devices, options), left = first, self.before[first], g - int(width[o])
            g, o = int(devices[left, o]), int(options[left, o])
            found.append((b, o))
            first = int(self.starts[b][g, o])
        options_of = self.relaxed.replicas, self.relaxed.way
        return tuple((end, *(int(one[o]) for one in options_of)) for end, o in reversed(found))  # type: ignore[misc]


class OutOfTime(Exception):
    """The search has used up its nodes or its time."""


def parts(relaxed: RelaxedWays) -> Parts:
    """All stages, with all options."""
    known = zip(relaxed.ways, relaxed.groups, relaxed.each, strict=True)
    each = ([part[..., own] for part in _parts(one, count)] for one, count, own in known)
    return Parts(*(np.concatenate(found, 2) for found in zip(*each, strict=True)))


def _parts(relaxed: Relaxed, devices: int) -> Parts:
    """All stages of one way, with up to this many replicas."""
    problem, n = relaxed.problem, len(relaxed.chain)
    forward, backward = relaxed.times(devices)
    both = forward + backward
    ahead = np.array([*[warmup_of(problem.warmup, 0, 2, problem.micro_batches)] * n, 1])
    fits, again = relaxed.repeats(devices, ahead[:, None, None])
    work = problem.micro_batches * (both + np.where(again, forward, 0.0))
    return Parts(forward, both, np.where(fits, work, inf), relaxed.tails(devices))


def tables(relaxed: RelaxedWays, parts: Parts, limit: float, until: float) -> Tables:
    """The tables for all devices. Raises OutOfTime at `until`, by `perf_counter`."""
    n = len(relaxed.problem.chain)
    nothing = np.full((n, relaxed.devices + 1, len(relaxed.width)), inf)
    nothing[0] = 0
    columns = nothing, nothing.copy(), nothing.copy()
    none = np.zeros((0, 0), np.int64)
    starts, before = [none], [(none, none)]  # of cut 0
    for b in range(1, n):
        if perf_counter() > until:
            raise OutOfTime
        ends = _ends(relaxed, columns, parts, b, limit)
        starts.append(ends.start)
        before.append(_cross(relaxed, columns, b, ends, limit))
    return Tables(relaxed, columns, _ends(relaxed, columns, parts, n, limit), starts, before)


def _ends(relaxed: RelaxedWays, columns: tuple[Floats, ...], parts: Parts, b: int, limit: float) -> Ends:
    """The columns for all stages before cut b."""
    width, g = relaxed.width, np.arange(relaxed.devices + 1)[:, None]
    left = np.maximum(g - width, 0)
    # By first layer, devices, options.
    arrived, way, most = (column[:b, left, np.arange(len(width))] for column in columns)
    forward, both, work, tail = (part[b, :b, None] for part in parts)
    way = np.maximum(way, arrived + tail)
    most = np.maximum(most, way + work)
    out = (most >= limit) | (width > g)
    through = np.where(out, inf, way + both)
    return Ends(
        np.where(out, inf, arrived + forward).min(0), through.min(0), np.where(out, inf, most).min(0), through.argmin(0)
    )


def _cross(relaxed: RelaxedWays, columns: tuple[Floats, ...], b: int, ends: Ends, limit: float) -> tuple[Ints, Ints]:
    """Fill the columns of cut b: those of all stages before it, with the transfer to the next stage. Returns the
    choices."""
    m = relaxed.problem.micro_batches
    after = relaxed.rest[b][::-1]  # with the devices that are left
    across = relaxed.crossings(b)  # by options before and after
    # By devices, options before and after.
    most = np.maximum(ends.own[..., None], ends.through[..., None] + (m + 1) * across + after[:, None, None])
    out = most >= limit
    arrive = np.where(out, inf, ends.arrive[..., None] + across).min(1)
    own = np.where(out, inf, most).min(1)
    each = np.where(out, inf, ends.through[..., None] + 2 * across)
    through, options = each.min(1), each.argmin(1)
    for column, found in zip(columns, (arrive, through, own), strict=True):  # on that many devices or fewer
        np.minimum.accumulate(found, 0, out=column[b])
    best = columns[1][b]
    better = best < np.vstack([np.full_like(best[:1], inf), best[:-1]])
    chosen = np.maximum.accumulate(np.where(better, np.arange(len(best))[:, None], 0), 0)
    return chosen, np.take_along_axis(options, chosen, 0)


def root(
    relaxed: RelaxedWays, parts: Parts, low: float, high: float, steps: int, until: float
) -> tuple[float, list[Sizes]]:
    """A lower bound on all plans that take less than `high`, by bisection from the known bound `low`, and the plans met
    on the way. It ends at `until`, by `perf_counter`."""
    found: list[Sizes] = []
    for _ in range(steps):
        if low >= high * (1 - 1e-4):
            break
        middle = (low + high) / 2
        try:
            made = tables(relaxed, parts, middle, until)
        except OutOfTime:
            break
        if made.total == inf:
            low = middle
        else:
            found.append(made.sizes)
            low, high = max(low, made.total), middle
    return low, found
