"""The least sum of costs that each depend on one choice or on two: exactly, by variable elimination.

    a ─ b ─ c ─ d      b goes first: the table of (a, c) is the least over b of (a, b) + (b, c); then c, a, d
        └───────┘

A variable with the fewest neighbours goes first. The tables stay small where the graph of the costs is like a chain or
a tree, as that of a model's layers is, however long (Dechter, "Bucket elimination", 1999).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np

LARGEST = 20_000_000  # entries of a table
Costs = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Choices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Table = tuple[tuple[int, ...], Costs]  # the variables of its dimensions, ascending; the costs of one problem or of each


class TooLarge(ValueError):
    """A table would have more than `LARGEST` entries."""


def least_sum(alone: Sequence[Costs], pairs: Mapping[tuple[int, int], Costs]) -> tuple[float, tuple[int, ...]]:
    """The least sum of costs, and the choices that have it. `alone[v]` is the cost of each choice for variable v, and
    `pairs[v, w]`, with v below w, those of each two choices. Raises TooLarge where the costs are too entangled.

    >>> costs = [np.array([0.0, 1.0]), np.array([3.0, 0.0])]
    >>> least_sum(costs, {(0, 1): np.array([[0.0, 5.0], [5.0, 0.0]])})
    (1.0, (1, 1))
    """
    return least_sums([costs[None] for costs in alone], pairs)[0]


def least_sums(alone: Sequence[Costs], pairs: Mapping[tuple[int, int], Costs]) -> list[tuple[float, tuple[int, ...]]]:
    """As `least_sum`, for several problems at once, which differ in `alone`: its arrays have a row for each problem.
    Most of the time goes into small tables, so that a few problems take little longer than one.

    >>> least_sums([np.array([[0.0, 1.0], [4.0, 1.0]])], {})
    [(0.0, (0,)), (1.0, (1,))]
    """
    count = len(alone[0]) if alone else 1
    tables: dict[int, list[Table]] = {v: [((v,), costs)] for v, costs in enumerate(alone)}
    beside: dict[int, set[int]] = {v: set() for v in range(len(alone))}
    for (v, w), costs in pairs.items():
        tables[v].append(((v, w), costs[None]))  # each table is kept at the first of its variables that goes
        beside[v].add(w)
        beside[w].add(v)
    held: dict[int, set[int]] = {v: {v} for v in tables}  # variables at which tables that name v are kept
    for v, w in pairs:
        held[w].add(v)
    heap = [(len(near), v) for v, near in beside.items()]
    heapify(heap)
    gone: list[tuple[int, tuple[int, ...], Choices]] = []
    done: set[int] = set()
    total = np.zeros(count)
    while heap:
        degree, v = heappop(heap)
        if v in done or degree != len(beside[v]):
            continue
        done.add(v)
        near = tuple(sorted(beside[v]))
        mine = _taken(tables, held[v], v)
        joined = _joined(mine, (*near, v), {one: alone[one].shape[1] for one in (*near, v)}, count)
        gone.append((v, near, joined.argmin(axis=-1)))
        left = joined.min(axis=-1)
        if near:
            tables[near[0]].append((near, left))
            for one in near:
                held[one].add(near[0])
        else:
            total += left
        for one in near:
            beside[one] |= set(near)
            beside[one] -= {one, v}
            heappush(heap, (len(beside[one]), one))
    chosen: dict[int, Choices] = {}
    for v, near, best in reversed(gone):
        chosen[v] = best[(np.arange(count), *(chosen[one] for one in near))]
    return [(float(total[row]), tuple(int(chosen[v][row]) for v in range(len(alone)))) for row in range(count)]


def _taken(tables: dict[int, list[Table]], where: set[int], v: int) -> list[Table]:
    """The tables that name v, which are no longer kept."""
    found: list[Table] = []
    for at in where:
        found += [one for one in tables[at] if v in one[0]]
        tables[at] = [one for one in tables[at] if v not in one[0]]
    return found


def _joined(tables: Sequence[Table], names: tuple[int, ...], counts: Mapping[int, int], count: int) -> Costs:
    """The sum of tables for each of `count` problems, with a dimension for each of `names`."""
    shape = tuple(counts[name] for name in names)
    if prod(shape) > LARGEST:
        raise TooLarge(f"a table of {len(names)} choices would have {prod(shape):,} entries")
    total = np.zeros((count, *shape))
    for own, costs in tables:
        order = sorted(range(len(own)), key=lambda at: names.index(own[at]))
        dims = [names.index(own[at]) for at in order]
        ordered = costs.transpose(0, *(1 + at for at in order))
        total += ordered.reshape(len(costs), *(shape[d] if d in dims else 1 for d in range(len(names))))
    return total
