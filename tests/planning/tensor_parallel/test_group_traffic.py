"""What a plan says that devices of a group take from the stage before is what moves where the plan runs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.cluster.network import Rate
from fxpipe.ir.cluster.published_clusters import A100
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.group_layout import Layout, OpCut, OpSharding, boxes
from fxpipe.passes.sharding.op_cuts import op_cuts
from fxpipe.passes.sharding.share_ops import share
from fxpipe.planning.stages.plan_stages import inner_cuts
from fxpipe.planning.tensor_parallel.cut_frontier import Counted, cut_space, frontier
from fxpipe.planning.tensor_parallel.group_costs import Group
from fxpipe.planning.tensor_parallel.group_traffic import group_traffic
from tests.helpers.marks import mostly_slow
from tests.helpers.models import Block
from tests.helpers.planning_graphs import graph
from tests.planning.tensor_parallel.test_group_costs import Pair


def test_a_device_takes_what_it_reads() -> None:
    """A value of 4 x 2 numbers, of which relu reads halves, and add, further on, all of it."""
    made = graph("a = relu(x)", "b = relu(a)", "c = relu(b)", "d = add(c, a)")
    halves = tuple(boxes(Layout(0), (4, 2), 2, at) for at in range(2))
    cuts = {
        "a": OpCut(),
        "b": OpCut(Layout(0), (("a", halves),)),
        "c": OpCut(Layout(0), (("b", halves),)),
        "d": OpCut(),
    }
    assert group_traffic(made, {"batch": 4}, cuts, 2) == [0, 32 + 16, 32 + 16, 32 + 32, 0]
    cuts["d"] = OpCut(Layout(0), (("c", halves), ("a", halves)))
    assert group_traffic(made, {"batch": 4}, cuts, 2) == [0, 16, 16 + 16, 16 + 16, 0]


def moved(made: Graph, sizes: Mapping[str, int], cut: int, degree: int, own: Mapping[str, OpSharding]) -> int:
    """Bytes that the device of the later of two stages takes that takes most."""
    stage = {op.name: int(at >= cut) for at, op in enumerate(made.ops)}
    placed = share(made, sizes, stage, [(1, degree)] * 2, own)
    types = {op.name: op.type for op in placed.graph.ops}
    moves = {
        (value, placed.devices[op.name])
        for op in placed.graph.ops
        for value in op.reads
        if value in types and placed.devices[value] < degree <= placed.devices[op.name]
    }
    taken = [0] * degree
    for value, device in moves:
        kind = types[value]
        assert isinstance(kind, TensorType)
        taken[device - degree] += prod(map(int, kind.shape)) * DTYPES[kind.dtype].size
    return max(taken)


PAIRS = [
    ("pairs", 1e-13, 2), ("blocks", 1e-13, 4), ("pairs", 1e-11, 4), ("blocks", 1e-11, 2), ("pairs", 1e-10, 2),
    ("blocks", 1e-10, 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "per_byte", "degree"), mostly_slow(PAIRS, PAIRS[2:4].__contains__))
def test_it_is_what_moves(name: str, per_byte: float, degree: int) -> None:
    """At each cut of the model, for each cut of ops. Within attention, where heads are reshaped, more moves."""
    make = {"pairs": Pair, "blocks": lambda width: Block(width, 8)}[name]
    model, x = nn.Sequential(make(256), make(256)), torch.ones(4, 64, 256)
    known = fxpipe.profile(model, x, device=A100)
    made, sizes = known.graph, known.sizes
    space = cut_space(made, sizes, known.ops, op_cuts(made, sizes, degree), Group(degree, Rate(1e-7, per_byte)))
    for one in frontier(space, space.fastest(), Counted(4, 2)):
        found, shardings = group_traffic(made, sizes, one.cuts, degree), {own.op: own for own in one.shardings}
        rows = [(found[cut], moved(made, sizes, cut, degree, shardings)) for cut in inner_cuts(made)]
        equal = [a == b for a, b in rows]
        assert all(a <= b for a, b in rows)
        assert all(equal) if name == "pairs" else sum(equal) >= 0.9 * len(equal), rows
