"""Programs without ops, for tests of when and where values move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType, ValueType
from fxpipe.ir.program.program import Loan, Move, Program, Stage, recut
from fxpipe.ir.schedule.schedule import parse

GRAPH = Graph("model", True, (), (), (), (), (), ((), {}), None)
TENSOR = TensorType("f32", ("b", 4), "cpu", grad=True)
MASK = TensorType("bool", ("b", 4), "cpu")
WEIGHT = TensorType("f32", (5, 4), "cpu", grad=True)

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


def replicated(program: Program, counts: Sequence[int]) -> Program:
    """The program with so many replicas of each stage, which has a weight beside those that it lends."""
    further = [
        tuple(f"{stage.device}{k}" for k in range(1, count))
        for stage, count in zip(program.stages, counts, strict=True)
    ]
    lent = [dict.fromkeys(loan.state for loan in program.loans if loan.home == s) for s in range(len(program.stages))]
    stages = tuple(
        replace(stage, replicas=labels, states=(f"weight{stage.index}", *states))
        for stage, labels, states in zip(program.stages, further, lent, strict=True)
    )
    types = program.types | {state: WEIGHT for stage in stages for state in stage.states}
    whole = replace(program, stages=stages, types=types)
    return replace(whole, moves=tuple(replace(m, dim=0) if recut(m, whole) else m for m in program.moves))


TWO = program(
    devices=("cuda:0", "cuda:1"),
    moves=[Move("image", -1, 0), Move("target", -1, 1), Move("x", 0, 1), Move("mask", 0, 1), Move("y", 1, 2)],
    loans=[Loan("w", 0, 1)],
    masks=["mask"],
    checkpoint="except_last",
)
