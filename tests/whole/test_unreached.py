"""What the loss does not reach has no gradient, None, as in the plain model: inputs, parameters, in calls and steps."""

from __future__ import annotations

from contextlib import closing
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.schedules.make_schedule import SCHEDULES
from tests.helpers.marks import mostly_slow

STEPS = tuple(name for name in SCHEDULES if name != "forward-only")
CHECKPOINTS = ("never", "except_last", "always")


class Sides(nn.Module):
    """Two towers and a gate, of which the loss reads one output alone, and an output without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.right = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor, z: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        y = self.idle(z) + offset
        z = z * scale
        for left, right in zip(self.left, self.right, strict=True):
            x, z = left(x).tanh(), right(z).tanh()
        return x, z, y, x.argmax(1)


def made() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = Sides().double()
    inputs = [torch.randn(4, 3, dtype=torch.double, requires_grad=True) for _ in range(2)]
    inputs += [torch.randn(3, dtype=torch.double, requires_grad=True) for _ in range(2)]
    return model, inputs


def gradients(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor | None]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {f"input {at}": tensor.grad for at, tensor in enumerate(inputs)}


def loss_of(which: int) -> Any:
    return lambda output: output[which].square().sum()


def assert_alike(ours: dict[str, Tensor | None], plain: dict[str, Tensor | None]) -> None:
    """Gradients where the plain model has them, and None where it has None."""
    assert {name for name, grad in ours.items() if grad is None} == {n for n, grad in plain.items() if grad is None}
    for name, grad in plain.items():
        torch.testing.assert_close(ours[name], grad)


def reference(which: int) -> dict[str, Tensor | None]:
    model, inputs = made()
    loss_of(which)(model(*inputs)).backward()
    found = gradients(model, inputs)
    assert any(grad is None for grad in found.values())
    return found


WAYS = list(zip(STEPS, cycle(CHECKPOINTS)))
WHOLE: dict[str, Any] = {"batch_dim": {"scale": None, "offset": None}, "devices": 3, "chunks": 2}


@pytest.mark.parametrize(("schedule", "checkpoint"), mostly_slow(WAYS, WAYS[::4].__contains__))
def test_a_step(schedule: str, checkpoint: str) -> None:
    model, inputs = made()
    with closing(fxpipe.compile(model, schedule=schedule, checkpoint=checkpoint, **WHOLE)) as pipe:
        for which in (0, 2):
            model.zero_grad()
            for tensor in inputs:
                tensor.grad = None
            pipe.step(*inputs, loss_fn=loss_of(which), outputs=True)
            assert_alike(gradients(model, inputs), reference(which))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_step_with_replicas(checkpoint: str) -> None:
    model, inputs = made()
    options = WHOLE | {"devices": 4}
    with closing(fxpipe.compile(model, replicas=[1, 2, 1], checkpoint=checkpoint, **options)) as pipe:
        pipe.step(*inputs, loss_fn=loss_of(0), outputs=True)
        assert_alike(gradients(model, inputs), reference(0))


@pytest.mark.parametrize("checkpoint", mostly_slow(CHECKPOINTS, "always".__eq__))
def test_a_call(checkpoint: str) -> None:
    for which in (0, 1, 2):
        model, inputs = made()
        with closing(fxpipe.compile(model, checkpoint=checkpoint, **WHOLE)) as pipe:
            loss_of(which)(pipe(*inputs)).backward()
            assert_alike(gradients(model, inputs), reference(which))
