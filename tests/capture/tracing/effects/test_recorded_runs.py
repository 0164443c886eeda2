"""An op that Dynamo has run does not run again, unless that would be another run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpipe.capture.capture_call import CallCapture
from fxpipe.capture.tracing.effects import op_effects
from fxpipe.ir.graph.graph import Graph, called
from fxpipe.ir.graph.value_types import TensorType

Forward = Callable[[nn.Linear, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, compute: Forward) -> None:
        super().__init__()
        self.fc, self.compute = nn.Linear(4, 4), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.fc, x)  # type: ignore[arg-type]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that have run again."""
    run, found = op_effects._run, []

    def noted(node: fx.Node, args: Any, kwargs: Any) -> Any:
        found.append(node.name)
        return run(node, args, kwargs)

    monkeypatch.setattr(op_effects, "_run", noted)
    return found


def captured(compute: Forward, *transforms: Any) -> Graph:
    return CallCapture(Net(compute), transforms=transforms).capture((torch.ones(6, 4),), {})


def test_no_op_runs_again(ran: list[str]) -> None:
    graph = captured(lambda fc, x: F.dropout(fc(x).tanh(), 0.5).relu_())
    assert ran == []
    assert [called(op) for op in graph.ops if op.random] == ["dropout"]
    assert called(graph.ops[-1]) == "relu_"


def _turned(fc: nn.Linear, x: Tensor) -> Tensor:
    h = x + 1
    before = h.tanh()
    h.unsqueeze_(1)
    return fc(before + h.squeeze(1))


def _needs_a_gradient_later(fc: nn.Linear, x: Tensor) -> Tensor:
    h = x + 1
    before = h.tanh()
    h.mul_(fc.weight.sum())
    return fc(before) + h


@pytest.mark.parametrize("compute", [_turned, _needs_a_gradient_later])
def test_what_an_op_changes_of_a_tensor_makes_all_ops_run_again(compute: Forward, ran: list[str]) -> None:
    graph = captured(compute)
    tanh = next(op for op in graph.ops if called(op) == "tanh")
    assert len(ran) == len(graph.ops)
    assert isinstance(tanh.type, TensorType)
    assert tanh.type.shape == ("b", 4)
    assert not tanh.type.grad


def _without_dropout(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.nodes:
        if node.target is F.dropout:
            node.args = (node.args[0], 0.0, *node.args[2:])
    return module


def test_an_op_with_another_number_runs_again() -> None:
    graph = captured(lambda fc, x: F.dropout(fc(x), 0.5) + 1, _without_dropout)
    assert not any(op.random for op in graph.ops)


def _twice(module: fx.GraphModule) -> fx.GraphModule:
    node = next(node for node in module.graph.nodes if node.target is torch.tanh)
    with module.graph.inserting_after(node):
        other = module.graph.node_copy(node, lambda used: used)
    next(user for user in node.users if user.target is torch.add).args = (node, other)
    return module


def test_a_copied_op_makes_another_tensor() -> None:
    def compute(fc: nn.Linear, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return torch.add(y, y).add_(fc(x))

    graph = captured(compute, _twice)
    assert [called(op) for op in graph.ops[:3]] == ["tanh", "tanh", "add"]
    assert graph.ops[2].reads == (graph.ops[0].name, graph.ops[1].name)
