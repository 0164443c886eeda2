"""Recompute marks come from the plan; a stage with nothing to recompute has none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fxpipe.passes import cut, lower
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.recompute import recompute
from tests.helpers.nets import Chain, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_same, of_graph, of_program


class Flags(nn.Module):
    """First numbers that need no gradient, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        flags = (x > 0.5).to(torch.float64)
        return torch.tanh(self.fc(flags))


def test_the_plans_mode_for_stages_that_need_gradients() -> None:
    model, x = make(Flags)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, checkpoint="except_last")
    assert [stage.checkpoint for stage in recompute(cut(graph, chosen), PassContext(chosen)).stages] == [
        "never",
        "except_last",
    ]


class DeadEnd(nn.Module):
    """A layer that needs a gradient which never comes: what is made of it is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).detach())


def test_a_stage_to_which_no_backward_comes_recomputes_nothing() -> None:
    model, x = make(DeadEnd)
    graph = trace(model, x)
    program = lower(graph, plan(graph, 2, 2, checkpoint="always"))
    assert any(op.type.grad for op in program.stages[0].ops)
    assert [stage.checkpoint for stage in program.stages] == ["never", "always"]


def test_never_changes_nothing() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    before = cut(graph, plan(graph, 2, 3))
    assert recompute(before, PassContext(plan(graph, 2, 3))) is before


def test_numbers() -> None:
    model, x = make(Flags)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, checkpoint="always")
    assert_same(of_program(recompute(cut(graph, chosen), PassContext(chosen)), model, x), of_graph(graph, model, x))


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Flags)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, checkpoint="except_last")
    golden("passes/recompute.txt", str(recompute(cut(graph, chosen), PassContext(chosen))))
