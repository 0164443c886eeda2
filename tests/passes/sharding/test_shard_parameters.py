"""Parts of parameters become states of their own, where they are nothing else than that."""

from __future__ import annotations

import operator
from typing import Any

import pytest

from fxpipe.ir.graph.graph import Graph, Op, Origin, Output, Ref, State
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.passes.sharding.shard_parameters import shard_parameters

WEIGHT = State("weight", "fc.weight", "parameter", TensorType("f32", (8, 6), "cpu", True))
BUFFER = State("mean", "norm.mean", "buffer", TensorType("f32", (8,), "cpu", False))
ALL = slice(None)


def placed(state: State, index: Any, *, returned: str = "y", writes: tuple[str, ...] = ()) -> Placed:
    """`taken`, a part of a state, is read by y, another op, which may write."""
    kind, origin = TensorType("f32", (4, 6), "cpu", True), Origin("", 0, "", "")
    taken = Op("taken", operator.getitem, (Ref(state.name), index), {}, kind, origin)
    y = Op("y", operator.neg, (Ref("taken"),), {}, kind, origin, writes=writes)
    graph = Graph("net", True, (), (), (state,), (taken, y), (Output(returned, None),), ((), {}), Ref(returned))
    return Placed(graph, {"taken": 1, "y": 1})


@pytest.mark.parametrize(
    ("index", "part", "held"),
    [
        (slice(0, 4), ((0, 4),), "fc.weight_0_4"),
        ((slice(4, 8), ALL), ((4, 8),), "fc.weight_4_8"),
        ((ALL, slice(2, 5)), ((0, 8), (2, 5)), "fc.weight_0_8_2_5"),
    ],
)
def test_a_part_is_held(index: Any, part: tuple[tuple[int, int], ...], held: str) -> None:
    made = shard_parameters(placed(WEIGHT, index))
    assert [op.name for op in made.graph.ops] == ["y"]
    (state,) = (state for state in made.graph.states if state.name == "taken")
    assert (state.path, state.part, state.held, state.kind) == ("fc.weight", part, held, "parameter")
    assert made.devices == {"y": 1}
    assert WEIGHT in made.graph.states  # for the keys of the package


@pytest.mark.parametrize(
    "other",
    [
        placed(WEIGHT, 3),
        placed(WEIGHT, slice(0, 4, 2)),
        placed(BUFFER, slice(0, 4)),
        placed(WEIGHT, slice(0, 4), returned="taken"),
        placed(WEIGHT, slice(0, 4), writes=("taken",)),
        placed(WEIGHT, slice(0, 4), writes=("weight",)),
    ],
    ids=["row", "step", "buffer", "returned", "written", "written whole"],
)
def test_anything_else_is_taken_out_each_time(other: Placed) -> None:
    assert shard_parameters(other) is other
