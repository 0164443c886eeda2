"""The cut of every op with which a group of devices is the fastest, and others that take longer and hold less.

    seconds                         each byte that a device holds may have a price, in seconds: the least sum of seconds
       |  3                         and price is a corner of the lower convex hull. The price at which two corners cost
       |    `.                      the same is the one to try next: a corner between them costs less, or there is none
       |      ` 2 - _
       |             ` - 1 price 0
       +-------------------- bytes

What is not on the hull is not found. A search over stages, whose memory has a limit, may take any of the corners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpipe.ir.graph.graph import Graph, op_name
from fxpipe.ir.operators.group_layout import OpCut, OpSharding
from fxpipe.ir.plan.profile import OpCost, total

from .group_costs import CutCosts, Group, Table
from .least_sum import least_sums

HIGHEST = 1e6  # price: that at which all bytes of the model cost this many times its seconds
ROUNDS = 1  # in which each two neighbouring corners are parted: at most three corners
NEARER = 1e-9  # by which share a corner must be below the line between two others


@dataclass(frozen=True)
class Counted:
    """How many bytes of memory stand for a byte of parameters, and for one that a micro-batch saves.

    - `copies`: of parameters, with their gradients and the optimizer's state.
    - `waiting`: the micro-batches whose activations are kept at once.
    """

    copies: float
    waiting: float

    def held(self, costs: OpCost) -> float:
        """The bytes that a device with these costs holds."""
        return self.copies * costs.parameters + self.waiting * costs.saved


@dataclass(frozen=True)
class GroupCosts:
    """What was found for a group.

    - `ops`: the costs of each op on one device of the group.
    - `shardings`, `cuts`: how each op is cut, in the order of the graph, and what devices then read, by name.
    - `price`: the seconds that a byte was said to cost.
    """

    ops: tuple[OpCost, ...]
    shardings: tuple[OpSharding, ...]
    cuts: Mapping[str, OpCut]
    price: float = 0.0

    @cached_property
    def total(self) -> OpCost:
        """The sums of all ops."""
        return total(self.ops)

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward of a micro-batch, one op after the other."""
        return self.total.forward + self.total.backward


@dataclass(frozen=True)
class CutSpace:
    """All ways to cut the ops of a graph, and what they cost.

    - `alone`: of each op the seconds of each way by itself.
    - `pairs`: by the positions of a value's op and its reader, seconds of each two ways.
    """

    costs: CutCosts
    alone: tuple[Table, ...]
    pairs: Mapping[tuple[int, int], Table]

    def fastest(self) -> GroupCosts:
        """The cut of every op with the least seconds. Raises least_sum.TooLarge where too many ops depend on each other
        at once."""
        return self._least([0.0], [own[None] for own in self.alone])[0]

    def priced(self, prices: Sequence[float], counted: Counted) -> list[GroupCosts]:
        """For each price, in seconds per byte, the cut of every op with the least sum of seconds and of the price of
        all bytes that a device holds. Raises least_sum.TooLarge as `fastest` does."""
        rows, weights = np.array(prices)[:, None], np.array([counted.copies, counted.waiting])
        costs, known = self.costs, dict[int, Table]()  # by kind of op: a model has few
        for op, own in zip(costs.graph.ops, self.alone, strict=True):
            kind = costs.kinds[op.name]
            if kind not in known:
                known[kind] = own + rows * (weights @ costs.memory_of_ways(op))
        return self._least(prices, [known[costs.kinds[op.name]] for op in costs.graph.ops])

    def _least(self, prices: Sequence[float], alone: Sequence[Table]) -> list[GroupCosts]:
        found = (chosen for _, chosen in least_sums(alone, self.pairs))
        return [self.of(chosen, price) for chosen, price in zip(found, prices, strict=True)]

    def of(self, chosen: Sequence[int], price: float = 0.0) -> GroupCosts:
        """The costs if each op has the way at the given position."""
        costs, graph = self.costs, self.costs.graph
        ways = {op.name: costs.ways[op.name][at] for op, at in zip(graph.ops, chosen, strict=True)}
        shardings = (
            OpSharding(op.name, op_name(op), way.cut.layout, way.cut.summed, way.gathered)
            for op in graph.ops
            if (way := ways[op.name])
        )
        cuts = {name: way.cut for name, way in ways.items()}
        return GroupCosts(tuple(costs.costs(op, ways) for op in graph.ops), tuple(shardings), cuts, price)


def cut_space(
    graph: Graph, sizes: Mapping[str, int], known: Sequence[OpCost], cuts: Mapping[str, Sequence[OpCut]], group: Group
) -> CutSpace:
    """The ways in which a group may compute the ops of a graph, each by one of its `cuts`. `known`: the costs on one
    device."""
    costs = CutCosts(graph, sizes, {cost.name: cost for cost in known}, cuts, group)
    position = {op.name: at for at, op in enumerate(graph.ops)}
    pairs = {(position[name], at): costs.edges(op, name) for at, op in enumerate(graph.ops)
             for name in costs.inputs[op.name] if name in position}  # fmt: skip
    alone = tuple(costs.alone_of_ways(op) for op in graph.ops)
    return CutSpace(costs, alone, {pair: seconds for pair, seconds in pairs.items() if seconds.any()})


def frontier(space: CutSpace, first: GroupCosts, counted: Counted) -> list[GroupCosts]:
    """Corners of the lower convex hull of seconds against bytes, from `first`, the fastest, to the one that holds the
    least: at most 1 + 2 ** `ROUNDS`. Raises least_sum.TooLarge as `CutSpace.fastest` does."""
    alone = total(list(space.costs.known.values()))
    if not counted.held(alone):
        return [first]
    (last,) = space.priced([HIGHEST * (alone.forward + alone.backward) / counted.held(alone)], counted)
    found, gaps = [first], [(first, last)]
    if counted.held(last.total) < counted.held(first.total) * (1 - NEARER):
        found.append(last)
    for _ in range(ROUNDS if len(found) > 1 else 0):
        prices = [_even(*gap, counted) for gap in gaps]
        between = zip(gaps, space.priced(prices, counted), prices, strict=True) if gaps else ()
        gaps = []
        for (a, b), one, price in between:
            if _value(one, price, counted) < _value(a, price, counted) * (1 - NEARER):
                found.append(one)
                gaps += [(a, one), (one, b)]
    return sorted(found, key=lambda one: one.price)


def _even(a: GroupCosts, b: GroupCosts, counted: Counted) -> float:
    """The price at which both cost the same: `b` takes as long or longer, and holds less."""
    return max(b.seconds - a.seconds, 0.0) / (counted.held(a.total) - counted.held(b.total))


def _value(one: GroupCosts, price: float, counted: Counted) -> float:
    return one.seconds + price * counted.held(one.total)
