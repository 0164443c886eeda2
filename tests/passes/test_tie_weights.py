"""Shared tensors: one home, and a loan to each other user."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fxpipe.ir.program.program import Loan, Program
from fxpipe.passes import cut
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.portals import portals
from fxpipe.passes.tie_weights import tie_weights
from tests.helpers.nets import Chain, Tied, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_same, of_graph, of_program


def lowered(model: nn.Module, x: Tensor, *sizes: int) -> Program:
    graph = trace(model, x)
    chosen = plan(graph, *sizes)
    return tie_weights(portals(cut(graph, chosen), PassContext(chosen)), PassContext(chosen))


def test_the_first_user_lends_to_the_others() -> None:
    model, x = make(Tied)
    program = lowered(model, x, 2, 2, 2, 2)  # embed | middle | embed | middle, and a row of embed
    assert program.loans == (Loan("embed_weight", 0, 2), Loan("embed_weight", 0, 3), Loan("middle_weight", 1, 3))
    assert [stage.borrows for stage in program.stages] == [
        (),
        (),
        ("embed_weight",),
        ("embed_weight", "middle_weight"),
    ]
    assert [stage.states for stage in program.stages] == [
        ("embed_weight",),
        ("middle_weight", "middle_bias"),
        (),
        (),
    ]
    assert {move.value for move in program.moves} == {"x", "tanh", "tanh_1", "tanh_2", "linear_3"}


def test_a_parameter_that_is_returned_still_goes_to_the_caller() -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.sin(x * self.w) + self.w, self.w

    model, x = Shown(), torch.rand(6, 4, dtype=torch.float64)
    program = lowered(model, x, 1, 2)
    assert [str(move) for move in program.moves] == ["x  -1 -> 0", "mul  0 -> 1", "add  1 -> 2", "w  0 -> 2  portal"]
    assert program.loans == (Loan("w", 0, 1),)
    assert_same(of_program(program, model, x), of_graph(trace(model, x), model, x))


def test_numbers() -> None:
    model, x = make(Tied)
    assert_same(of_program(lowered(model, x, 2, 2, 2, 2), model, x), of_graph(trace(model, x), model, x))


def test_without_shared_tensors_nothing_changes() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    before = cut(graph, plan(graph, 2, 3))
    assert tie_weights(before, PassContext(plan(graph, 2, 3))) is before


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Tied)
    golden("passes/tie_weights.txt", str(lowered(model, x, 2, 2, 4)))
