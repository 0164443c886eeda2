"""The space of strategies that is searched: for each operator all degrees that divide the number of devices, and whose
product does, on any run of neighbouring devices.

A 2d convolution on 4 devices has 26 configs: 4 whole, 12 in two parts (4 dimensions, 3 runs of devices), and 10 in four
parts. Operators that are fed in are not placed.

The roles S, A and P are those of the SOAP paper, and its space is "SAP". "R" (for reduction) adds several holders of
each region: partial sums for operators that sum over a dimension, copies for the others.

What may be recomputed are groups of operators that are neighbours in the order of the graph, such as the layers of a
block, all of a group or none of it:

    operators   a  b  c | d  e | f  g  h        kept: what c and e put out, and what else is read across a cut
                                                again in backward, for one group at a time: all of the group

Many small groups keep much, and few large ones need much for one of them. The groups are those that need the least
memory together, on one device that recomputes all of them, of those that a walk along the graph finds: it ends a group
where the least is read across, before the group is larger than a certain size; several sizes are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import prod

from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, fits

from .strategy_memory import leaving

MOST = 64  # groups
Groups = tuple[tuple[str, ...], ...]


def fixed(operator: Operator) -> Config:
    """The config of an operator that is not placed: one that is fed in."""
    return Config((1,) * len(operator.output), (0,))


def place(operator: Operator, degrees: tuple[int, ...], first: int, holders: int = 1) -> Config:
    """The config with these degrees and holders, and its parts on neighbouring devices from `first` on."""
    return Config(degrees, tuple(range(first, first + prod(degrees) * holders)), holders)


@cache
def configs(operator: Operator, devices: int, roles: str = "SAP") -> tuple[Config, ...]:
    """Every config of an operator on this many devices, where dimensions of these roles may be cut."""
    if operator.kind == "input":
        return (fixed(operator),)
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    choices = [
        [d for d in divisors if d <= one.size and fits(one, d)] if one.role and one.role in roles else [1]
        for one in operator.output
    ]
    choices.append([d for d in divisors if not 0 < operator.summed < d] if "R" in roles else [1])
    return tuple(
        place(operator, tuple(degrees), first, holders)
        for *degrees, holders in product(*choices)
        if devices % (prod(degrees) * holders) == 0
        for first in range(devices - prod(degrees) * holders + 1)
    )


def groups(graph: OperatorGraph) -> Groups:
    """All operators of the graph, but for those that are fed in, in groups."""
    sizes = {operator.name: operator.elements for operator in graph if operator.kind != "input"}
    total, crossing = sum(sizes.values()), _crossing(graph, list(sizes))
    tries = range(1, min(MOST, len(sizes)) + 1)
    found = [tuple(_walk(sizes, crossing, 1.5 * total / count)) for count in tries]
    return min(found, key=lambda one: (_needed(graph, sizes, one), len(one)), default=())


def _crossing(graph: OperatorGraph, names: list[str]) -> list[int]:
    """For each operator how many elements are read across a cut right after it."""
    place = {name: at for at, name in enumerate(names)}
    last = dict(place)
    for operator in graph:
        for name in operator.inputs:
            if name in place:
                last[name] = max(last[name], place[operator.name])
    changes = [0] * (len(names) + 1)
    for name, at in place.items():
        size = graph.operator(name).elements
        changes[at] += size
        changes[last[name]] -= size
    found, now = [], 0
    for at in range(len(names)):
        now += changes[at]
        found.append(now)
    return found


def _walk(sizes: dict[str, int], crossing: list[int], most: float) -> Iterator[tuple[str, ...]]:
    """Groups of at most `most` elements, or of one operator. Each ends in its second half, where the least crosses."""
    names, first = list(sizes), 0
    while first < len(names):
        after, size, ends = first, 0, list[int]()
        while after < len(names) and (after == first or size + sizes[names[after]] <= most):
            size += sizes[names[after]]
            after += 1
            if 2 * size >= most:
                ends.append(after)
        if after < len(names):
            after = min(ends or [after], key=lambda end: (crossing[end - 1], -end))
        yield tuple(names[first:after])
        first = after


def _needed(graph: OperatorGraph, sizes: dict[str, int], found: Groups) -> float:
    """Elements in memory when all groups are recomputed on one device: all that leaves a group, and one group."""
    outside = leaving(graph, found)
    left = [sum(sizes[name] for name in group if name in outside) for group in found]
    again = [graph.kept * sum(sizes[name] for name in group) for group in found]
    return sum(left) + max(all_of - kept for all_of, kept in zip(again, left, strict=True))
