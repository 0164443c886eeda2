"""`schedule="auto"` runs wherever a schedule by name runs, with the plain model's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        pytest.param(small, (4, 4), {"devices": 3, "chunks": 2}, marks=pytest.mark.slow),
        pytest.param(small, (4, 4), {"devices": 2, "chunks": 2, "cut": [1, 1]}, marks=pytest.mark.slow),
        (small, (4, 4), {"devices": 2, "chunks": 2, "cut": ["1"]}),
        (small, (4, 4), {"devices": 2, "chunks": 4, "warmup": (2, 1)}),
        (small, (4, 4), {"devices": 2, "chunks": 2, "checkpoint": {1}}),
        (norm, (2, 4, 4), {"devices": 4, "replicas": (2, 1, 1), "chunks": 1, "checkpoint": "always"}),
    ],
)
def test_what_a_schedule_by_name_runs_auto_runs(make: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    twin = copy.deepcopy(model)
    for schedule in ("1f1b", "auto"):
        model.zero_grad(), twin.zero_grad()
        pipe = fxpipe.compile(model, schedule=schedule, **options)
        loss = pipe.step(x, loss_fn=lambda out: (out * out).sum())
        wanted = (twin(x) ** 2).sum()
        wanted.backward()
        assert torch.allclose(loss, wanted, atol=1e-5)
        for name, parameter in twin.named_parameters():
            given = model.get_parameter(name).grad
            assert (given is None) == (parameter.grad is None)
            assert given is None or torch.allclose(given, parameter.grad, atol=1e-5)
        pipe.close()


def test_too_many_stages_for_any_schedule() -> None:
    """The error is of the number of devices that was asked for, not of twice as many stages."""
    pipe = fxpipe.compile(small(), 9, 2, schedule="auto")
    with pytest.raises(PlanError, match="cannot be cut into 9 stages"):
        pipe.step(torch.randn(4, 4), loss_fn=Tensor.sum)
    pipe.close()
