"""Cuts of ops for a price of memory, and the stages that they make, against all there are: written down one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.ir.cluster.network import Rate
from fxpipe.ir.graph.graph import Graph, op_name
from fxpipe.ir.operators.group_layout import REPLICATED, Layout, OpCut, boxes
from fxpipe.ir.plan.profile import OpCost, total
from fxpipe.planning.tensor_parallel.cut_frontier import Counted, CutSpace, GroupCosts, cut_space, frontier
from fxpipe.planning.tensor_parallel.group_costs import Group
from tests.helpers.marks import mostly_slow
from tests.helpers.planning_graphs import graph

SIZES, MOST = {"batch": 4}, 100_000
Grid = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def random_graph(rng: random.Random) -> Graph:
    """Chains, diamonds, values with several readers, inputs and weights that are read twice."""
    lines, values = [], ["x"]
    for at in range(rng.randint(2, 5)):
        kind = rng.choice(["linear", "matmul", "relu", "add", "add"])
        first, second = rng.choice(values[-2:]), rng.choice(values)
        reads = {"linear": f"{first}, w{rng.randrange(2)}", "relu": first}.get(kind, f"{first}, {second}")
        lines.append(f"v{at} = {kind}({reads})")
        values.append(f"v{at}")
    return graph(*lines)


def random_cuts(rng: random.Random, made: Graph, degree: int) -> dict[str, list[OpCut]]:
    """For each op the replicated cut, and some others: each value that it reads whole, in parts, or somehow."""

    def read(name: str) -> tuple[str, tuple[tuple[tuple[tuple[int, int], ...], ...], ...]]:
        shape = (2, 2) if name.startswith("w") else (4, 2)
        rows = sorted(rng.choices(range(shape[0] + 1), k=2))
        somehow = (((rows[0], rows[1]), (0, 2)),)
        layout = rng.choice([Layout(0), Layout(1)])
        return name, tuple(rng.choice([boxes(layout, shape, degree, at), somehow]) for at in range(degree))

    found = {}
    for op in made.ops:
        cuts = [OpCut()]
        for _ in range(rng.randint(0, 2)):
            layout = rng.choice([REPLICATED, Layout(0), Layout(1), Layout(1)])
            reads = tuple(read(name) for name in dict.fromkeys(op.reads) if rng.random() < 0.7)
            summed = int(op_name(op) in ("linear", "matmul") and rng.random() < 0.5)
            if layout != REPLICATED or summed:
                cuts.append(OpCut(layout, reads, summed))
        found[op.name] = cuts
    return found


@dataclass(frozen=True)
class Members:
    """All ways to cut a graph at once: each figure is an array with a dimension for each op."""

    space: CutSpace
    counted: Counted

    @property
    def ops(self):
        return self.space.costs.graph.ops

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.space.costs.ways[op.name]) for op in self.ops)

    def along(self, figures: Sequence[Sequence[float]] | Grid, *dims: int) -> Grid:
        """An array of figures over these ops, whatever the ways of the others."""
        table = np.array(figures, float)
        return table.reshape([self.shape[at] if at in dims else 1 for at in range(len(self.shape))])

    def seconds(self, ops: Sequence[int]) -> Grid:
        """Of these ops, with what each reads of others."""
        costs, at = self.space.costs, {op.name: number for number, op in enumerate(self.ops)}
        found = np.zeros([1] * len(self.shape))
        for w in ops:
            op, takers = self.ops[w], costs.ways[self.ops[w].name]
            found = found + self.along([sum(costs.alone(op, way)) for way in takers], w)
            for name in dict.fromkeys(op.reads):
                if name in at:
                    rows = [
                        [sum(costs.edge(name, a.layout, a.whole, dict(b.cut.reads).get(name), costs.takes_whole(b)))
                         for b in takers] for a in costs.ways[name]
                    ]  # fmt: skip
                    found = found + self.along(rows, at[name], w)
        return found

    def bytes(self, ops: Sequence[int]) -> Grid:
        found = np.zeros([1] * len(self.shape))
        for w in ops:
            own = [self.space.costs.memory(self.ops[w], way.cut) for way in self.space.costs.ways[self.ops[w].name]]
            weighted = [self.counted.copies * held + self.counted.waiting * saved for held, saved in own]
            found = found + self.along(weighted, w)
        return found


def instance(seed: int) -> Members | None:
    """None if there are too many ways."""
    rng = random.Random(seed)
    made, degree = random_graph(rng), 2
    known, unused = [], {state.name for state in made.states}
    for op in made.ops:
        first = unused.intersection(op.reads)
        unused -= first
        times = rng.choice([1e-6, 1e-5, 1e-4]), rng.choice([0.0, 1e-5, 2e-4])
        known.append(OpCost(op.name, *times, rng.choice([0, 32, 64]), 32, 16 * len(first)))
    group = Group(degree, Rate(rng.choice([0.0, 1e-6]), 10 ** rng.uniform(-9, -5)))
    space = cut_space(made, SIZES, known, random_cuts(rng, made, degree), group)
    found = Members(space, Counted(rng.choice([0, 2, 4]), rng.choice([0.5, 1, 3])))
    return found if prod(found.shape) <= MOST else None


def value(one: OpCost, price: float, counted: Counted) -> float:
    return one.forward + one.backward + price * counted.held(one)


def compare(seed: int) -> bool:
    """Whether there were few enough ways to try them all."""
    members = instance(seed)
    if members is None:
        return False
    space, counted, every = members.space, members.counted, range(len(members.ops))
    seconds, held = members.seconds(every), members.bytes(every)
    first = space.fastest()
    assert first.price == 0
    assert first.seconds == pytest.approx(seconds.min(), rel=1e-9)
    prices = [0.0, *(10 ** random.Random(seed).uniform(-9, -5) for _ in range(2))]
    for price, found in zip(prices, space.priced(prices, counted), strict=True):
        assert value(found.total, price, counted) == pytest.approx((seconds + price * held).min(), rel=1e-9)
        stages(members, found)
    corners = frontier(space, first, counted)
    assert corners[0] == first
    for one in corners:
        assert value(one.total, one.price, counted) == pytest.approx((seconds + one.price * held).min(), rel=1e-9)
    times, bytes = [one.seconds for one in corners], [counted.held(one.total) for one in corners]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    assert bytes == sorted(set(bytes), reverse=True)
    assert bytes[-1] == pytest.approx(held.min(), rel=1e-6)
    return True


def stages(members: Members, found: GroupCosts) -> None:
    """A stage costs the least of all its ways, with the layouts that are given at its two ends: of what it takes, and
    of what it gives."""
    costs, price, counted = members.space.costs, found.price, members.counted
    chosen = position(members, found)
    for first, end in combinations(range(len(members.ops) + 1), 2):
        inside = range(first, end)
        given = {name for op in members.ops[end:] for name in costs.inputs[op.name]}
        free = [at for at in inside if members.ops[at].name not in given]
        figures = members.seconds(inside) + price * members.bytes(inside)
        every = np.broadcast_to(figures, members.shape)
        fixed = tuple(slice(None) if at in free else slice(way, way + 1) for at, way in enumerate(chosen))
        own = value(total(found.ops[first:end]), price, counted)
        assert own == pytest.approx(every[fixed].min(), rel=1e-9, abs=1e-18), (first, end)


def position(members: Members, found: GroupCosts) -> tuple[int, ...]:
    """Which ways were chosen: some that cost what was found, op by op, and are cut so."""
    shape, space = members.shape, members.space
    for chosen in np.ndindex(*shape):
        if space.of(chosen, found.price) == found:
            return chosen
    raise AssertionError("what was found is none of the ways")


@pytest.mark.parametrize("start", mostly_slow(range(0, 400, 50), range(100).__contains__))
def test_all_ways_of_400_graphs(start: int) -> None:
    assert sum(compare(seed) for seed in range(start, start + 50)) >= 25


@settings(max_examples=30, deadline=None)
@given(st.integers(400, 10**9))
def test_all_ways(seed: int) -> None:
    compare(seed)
