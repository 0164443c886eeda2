"""Recompute marks come from the plan; a stage with nothing to recompute has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import PlanError
from fxpipe.passes import cut
from fxpipe.passes.recompute import recompute
from tests.passes.graphs import trace
from tests.passes.nets import Chain, make, plan
from tests.passes.same import assert_same, of_graph, of_program


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
    assert [stage.checkpoint for stage in recompute(cut(graph, chosen), chosen).stages] == ["never", "except_last"]


def test_never_changes_nothing() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    before = cut(graph, plan(graph, 2, 3))
    assert recompute(before, plan(graph, 2, 3)) is before


def test_numbers() -> None:
    model, x = make(Flags)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, checkpoint="always")
    assert_same(of_program(recompute(cut(graph, chosen), chosen), model, x), of_graph(graph, model, x))


def test_refuses_a_stage_that_changes_a_parameter() -> None:
    class Clamping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.v * self.w.clamp_(0, 1)

    model, x = make(Clamping)
    graph = trace(model, x)  # mul clamp_ mul
    chosen = plan(graph, 3, checkpoint="always")
    with pytest.raises(PlanError, match=r"stage 0 cannot be recomputed: op clamp_, at net.py:4  clamp_, changes the"):
        recompute(cut(graph, chosen), chosen)


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Flags)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, checkpoint="except_last")
    golden("passes/recompute.txt", str(recompute(cut(graph, chosen), chosen)))
