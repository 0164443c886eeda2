"""A program's meaning: each stage sees only what it takes, owns and borrows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Size, State
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import OWN_DEVICE, Loan, Move, Program, RuntimeCall, Stage, check
from tests.helpers.evaluate_program import evaluate_program

ROW, HERE = TensorType("f32", ("b", 2), "cpu"), Origin("net.py", 1, "", "")
X, W, B, Y = Ref("x"), Ref("w"), Ref("b"), Ref("y")

y = Op("y", "mul", (X, W), {}, ROW, HERE)
ids = Op("ids", torch.arange, (B,), {"device": OWN_DEVICE}, TensorType("i64", ("b",), "cpu"), HERE)
z = Op("z", RuntimeCall("scale"), (Y, W), {}, ROW, HERE)
graph = Graph(
    "Net", True, (Input("x", "x", ROW, 0),), (Size("b", "x", 0),), (State("w", "fc.w", "parameter", ROW),), (y, ids, z),
    (Output("z", 0), Output("ids", 0)), ((X,), {}), (Ref("z"), Ref("ids")),
)  # fmt: skip
first = Stage(0, "cpu:0", (y,), ("x",), ("y",), ("w",))
second = Stage(1, "cpu:1", (ids, z), ("y", "b"), ("ids", "z"), (), ("w",))
moves = (Move("x", -1, 0), Move("y", 0, 1), Move("ids", 1, 2), Move("z", 1, 2))
program = Program(graph, (first, second), moves, (Loan("w", 0, 1),), graph.types)


def run(program: Program) -> dict[str, torch.Tensor]:
    w = torch.full((1, 2), 3.0)
    return evaluate_program(program, {"x": torch.ones(4, 2)}, {"w": w}, runtime={"scale": torch.mul})


def test_values_move_and_marks_are_replaced() -> None:
    check(program)
    found = run(program)
    assert found["z"].tolist() == [[9.0, 9.0]] * 4
    assert found["ids"].tolist() == [0, 1, 2, 3]


def test_a_stage_does_not_see_what_it_does_not_take() -> None:
    blind = replace(program, stages=(first, replace(second, takes=("b",))))
    with pytest.raises(KeyError, match="y"):
        run(blind)


def test_a_runtime_call_is_only_a_mark() -> None:
    with pytest.raises(TypeError, match="scale is a mark for generated code"):
        RuntimeCall("scale")()
