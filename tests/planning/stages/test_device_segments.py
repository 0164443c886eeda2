"""Ops on devices become few segments, in an order in which they can run."""

from __future__ import annotations

import operator

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref
from fxpipe.ir.graph.value_types import TensorType, TupleType
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.planning.stages.device_segments import segments

X = TensorType("f32", (4, 4), "cpu", True)
ORIGIN = Origin("net.py", 3, "x = self.fc(x)", "fc")


def op(name: str, *reads: str, writes: tuple[str, ...] = (), type: TensorType | TupleType = X) -> Op:
    """It reads the input if nothing else."""
    reads = reads or ("x",)
    return Op(name, operator.add, tuple(map(Ref, reads)), {}, type, ORIGIN, writes=writes)


def placed(on: str, *ops: Op) -> Placed:
    """`on` has the device of each op."""
    graph = Graph(
        "net", True, (Input("x", "x", X, 0),), (), (), ops, (Output(ops[-1].name, 0),), ((), {}), Ref(ops[-1].name)
    )
    return Placed(graph, {one.name: int(device) for one, device in zip(ops, on, strict=True)})


def shown(placed: Placed, **seconds: float) -> str:
    return " | ".join(f"{segment.device}: {' '.join(segment.ops)}" for segment in segments(placed, seconds))


def test_a_device_takes_all_it_can_before_another_has_its_turn() -> None:
    """a ─ b ─ c ┄┄┄┄ f on device 0, d and e beside c on device 1."""
    ops = op("a"), op("b", "a"), op("d", "b"), op("c", "b"), op("e", "d"), op("f", "c", "e")
    assert shown(placed("001010", *ops)) == "0: a b c | 1: d e | 0: f"


def test_nobody_waits_for_what_others_do_not_need() -> None:
    """Device 1 waits for a, so that b, which takes long, is a segment of its own."""
    ops = op("a"), op("b"), op("c", "a"), op("d", "b", "c")
    assert shown(placed("0010", *ops)) == "0: a b | 1: c | 0: d"
    assert shown(placed("0010", *ops), a=1, b=1, c=1, d=1) == "0: a | 0: b | 1: c | 0: d"
    assert shown(placed("0010", *ops), a=1, b=1e-6, c=1, d=1) == "0: a b | 1: c | 0: d"


def test_what_is_made_of_nothing_waits_for_its_first_reader() -> None:
    """Zeros for a state would be a segment of their own before b, which waits for device 0."""
    zeros = Op("zeros", operator.add, (), {}, X, ORIGIN)
    assert shown(placed("1011", zeros, op("a"), op("b", "a", "zeros"), op("c", "b"))) == "0: a | 1: zeros b c"
    assert shown(placed("101", zeros, op("a"), op("b", "a", "zeros")), a=1, b=1) == "0: a | 1: zeros b"


def test_what_is_tied_runs_in_one_segment() -> None:
    """p is a tuple, which does not leave its segment, so q, between its readers, is in it too."""
    p = op("p", "a", type=TupleType((X, X)))
    ops = op("a"), p, op("b", "p"), op("q", "b"), op("c", "p", "q"), op("z", "a")
    assert shown(placed("000001", *ops)) == "0: a p b q c | 1: z"
    with pytest.raises(PlanError, match=r"op p, at net.py:3.*is on device 0 and op q.*on device 1.*must run together"):
        segments(placed("000101", *ops))


def test_memory_is_read_before_it_is_written() -> None:
    """w writes a in place, which r on another device reads as it was: w waits for r."""
    ops = op("a"), op("r", "a"), op("w", "a", writes=("a",)), op("z", "w", "r")
    assert shown(placed("0100", *ops)) == "0: a | 1: r | 0: w z"
