"""Programs without ops, for tests of when and where values move."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.ir.graph import Graph
from fxpipe.ir.program import Loan, Move, Program, Stage
from fxpipe.ir.schedule import parse
from fxpipe.ir.types import TensorType, ValueType

GRAPH = Graph("model", True, (), (), (), (), (), ((), {}), None)
TENSOR = TensorType("f32", ("b", 4), "cpu", grad=True)
MASK = TensorType("bool", ("b", 4), "cpu")

EARLY = parse("F0 F1 B0 B1 \n F0 B0 F1 B1", name="1f1b")


def program(
    devices: Sequence[str],
    moves: Sequence[Move],
    loans: Sequence[Loan] = (),
    masks: Sequence[str] = (),
    checkpoint: str = "never",
) -> Program:
    stages = tuple(Stage(s, device, (), (), (), (), checkpoint=checkpoint) for s, device in enumerate(devices))
    names = [move.value for move in moves] + [loan.state for loan in loans]
    types: dict[str, ValueType] = {name: MASK if name in masks else TENSOR for name in names}
    return Program(GRAPH, stages, tuple(moves), tuple(loans), types)


TWO = program(
    devices=("cuda:0", "cuda:1"),
    moves=[Move("image", -1, 0), Move("target", -1, 1), Move("x", 0, 1), Move("mask", 0, 1), Move("y", 1, 2)],
    loans=[Loan("w", 0, 1)],
    masks=["mask"],
    checkpoint="except_last",
)
