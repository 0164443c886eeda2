"""Branch and bound: finds a plan that takes less than `limit`, or shows that there is none.

Plans are built from their last stage on, because how many forwards a stage runs ahead depends on the stages after it.
For stages s .. n - 1 there are three lower bounds (see `shape_costs.before`), whatever comes before them. All count
from the moment at which s gets its first micro-batch:

    trip      until the first backward of s has ended
    done      until its last backward has ended
    finish    until all stages have finished

The tables of `lower_bound.py` have lower bounds for the layers before s. Together they bound the step:

    arrive + finish,   through + done,   own

A branch whose bound is `limit` or more is cut off. The search is quick because it remembers what it has refuted. If
bounds alone cut off all that can come before some stages, they also cut it off for stages that start at the same
layer, have the same devices left, the same devices and way in their first stage, and no smaller one of the three
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter
from typing import NamedTuple

from .device_symmetry import Counts
from .lower_bound import First, OutOfTime, Tables
from .shape_costs import Shape, Shapes, before

Three = tuple[float, float, float]
Key = tuple[int, Counts, Counts, int, int]


class Node(NamedTuple):
    """The stages from layer `first` on.

    - `bound`: no plan with these stages takes fewer seconds.
    - `left`: the devices left, for each run.
    - `counts`, `way`: the devices of the first of the stages, for each run, and its way.
    - `three`: trip, done and finish.
    - `shape`: the stages.
    """

    bound: float
    first: int
    left: Counts
    counts: Counts
    way: int
    three: Three
    shape: Shape


@dataclass
class Refutation:
    """One search.

    - `limit`: the seconds to be less than; each plan that is found lowers it.
    - `until`, `budget`: when to stop, by `perf_counter` and by nodes.
    - `in_order`: whether stages take devices in the order of the cluster, the last stage the last ones; then nothing
      is shown for other placements.
    - `best`: the last plan that was found.
    - `refuted`, `choices`: what the search remembers.
    """

    shapes: Shapes
    tables: Tables
    limit: float
    until: float
    budget: float
    in_order: bool = False
    nodes: int = 0
    best: Shape = ()
    refuted: dict[Key, list[Three]] = field(default_factory=dict)
    choices: dict[tuple[Counts, int], list[tuple[Counts, Counts]]] = field(default_factory=dict)

    @property
    def threshold(self) -> float:
        """The limit with room for rounding: bounds add up in another order than times."""
        return self.limit * (1 + 1e-12)


def refute(search: Refutation) -> bool:
    """True if the whole space was searched: no plan takes less than `search.limit`. False if nodes or time ran out."""
    left = tuple(len(run) for run in search.shapes.runs)
    root = Node(0.0, len(search.shapes.problem.chain), left, (), 0, (0.0, 0.0, 0.0), ())
    try:
        _expand(search, root)
    except OutOfTime:
        return False
    return True


def _expand(search: Refutation, node: Node) -> bool:
    """Search all that can come before `node`. True if bounds alone have cut off everything."""
    search.nodes += 1
    if search.nodes > search.budget or perf_counter() > search.until:
        raise OutOfTime
    pure = True
    for child in sorted(_children(search, node)):
        if child.bound >= search.threshold:
            break
        if child.first == 0:
            time = search.shapes.time(child.shape, search.limit)
            pure = False
            if time < search.limit:
                search.limit, search.best = time, child.shape
            continue
        key = (child.first, child.left, child.counts, child.way, len(child.shape))
        known = search.refuted.get(key, [])
        if any(a <= child.three[0] and b <= child.three[1] and c <= child.three[2] for a, b, c in known):
            continue
        if not _expand(search, child):
            pure = False
        else:
            trip, done, finish = child.three
            kept = [e for e in known if not (trip <= e[0] and done <= e[1] and finish <= e[2])]
            search.refuted[key] = [*kept, child.three]
    return pure


def _children(search: Refutation, node: Node) -> Iterator[Node]:
    """The node with one more stage before it: all layers, devices and ways that bounds do not cut off."""
    for way in range(len(search.shapes.ways)):
        yield from _of_way(search, node, way)


def _of_way(search: Refutation, node: Node, way: int) -> Iterator[Node]:
    shapes, threshold = search.shapes, search.threshold
    m, (_, done, finish) = shapes.problem.micro_batches, node.three
    end, behind = node.first, len(node.shape)
    ahead, degree, options = shapes.ahead(behind), shapes.ways[way].degree, search.tables.relaxed.option[way]
    open_firsts: dict[int, list[First]] = {}  # by devices taken
    for counts, left in _choices(search, node.left, degree):
        taken, free = sum(counts), sum(left)
        firsts = open_firsts.get(taken)
        if firsts is None:
            option = options[taken // degree]
            firsts = open_firsts[taken] = search.tables.firsts(end, free, option, done, finish, threshold)
        down, up = shapes.link(end, counts, way, node.counts, node.way) if behind and firsts else (0.0, 0.0)
        for first, arrive, through, own in firsts:
            cost = shapes.stage(first, end, counts, way, ahead)
            if cost is None:
                continue
            if behind:
                three = before(cost, ahead, down, up, m, *node.three)
            else:
                work = cost.forward + cost.again + cost.backward
                three = work, m * work, m * work + cost.tail
            if three[1] >= threshold:
                break  # more layers only take longer
            bound = max(arrive + three[2], through + three[1], own)
            if bound < threshold:
                yield Node(bound, first, left, counts, way, three, ((end, counts, way), *node.shape))


def _choices(search: Refutation, left: Counts, degree: int) -> list[tuple[Counts, Counts]]:
    """The devices that a stage of groups of `degree` may have, and those left after it."""
    found = search.choices.get((left, degree))
    if found is None:
        in_order = search.in_order
        every = _tails(left, degree) if in_order else product(*(range(0, count + 1, degree) for count in left))
        found = search.choices[left, degree] = [
            (counts, tuple(a - b for a, b in zip(left, counts, strict=True))) for counts in every if any(counts)
        ]
    return found


def _tails(left: Counts, degree: int) -> Iterator[Counts]:
    """The last groups, in every number.

    >>> list(_tails((1, 2), 1)), list(_tails((4, 3), 2))
    ([(0, 1), (0, 2), (1, 2)], [(0, 2), (2, 2), (4, 2)])
    """
    taken = [0] * len(left)
    for run in reversed(range(len(left))):
        for _ in range(left[run] // degree):
            taken[run] += degree
            yield tuple(taken)
