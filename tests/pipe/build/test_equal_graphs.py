"""A model that is captured again, and computes the same, is not planned again."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe

X, Y = torch.randn(8, 4, dtype=torch.double), torch.arange(8) % 3


class Settling(nn.Module):
    """Its first forward finds out what kind of problem it is for, as that of a classifier of transformers does."""

    def __init__(self, first: Any, later: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.kind: str | None = None
        self.first, self.later = first, later
        self.shift: Any = torch.zeros(4, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).sigmoid() + self.shift
        factor = self.later
        if self.kind is None:
            self.kind, factor = "one label", self.first
        return self.b(y * factor)


@pytest.mark.parametrize(
    ("first", "later", "equal"),
    [(2.0, 2.0, True), (2.0, 3.0, False), (1, True, False), (1, 1.0, False), (0.0, -0.0, False)],
)
def test_equal_graphs_have_one_build(first: Any, later: Any, equal: bool) -> None:
    model = Settling(first, later).double()
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, devices=2, chunks=4)) as pipe:
        builds = []
        for step in range(3):
            for one in (model, plain):
                one.shift = torch.full((4,), float(step), dtype=torch.double)
            loss = pipe.step(X, target=Y, loss_fn=F.cross_entropy)
            expected = F.cross_entropy(plain(X), Y)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            builds.append(pipe.build)
        assert (builds[0].plan is builds[1].plan) == equal
        assert builds[1].plan is builds[2].plan
        assert len(pipe._state.cache.lives) == (1 if equal else 2)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("dtype", "builds"), [(torch.float32, 2), (torch.float64, 1)])
def test_autocast_makes_another_graph_where_it_does_something(dtype: torch.dtype, builds: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)).to(dtype)
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, devices=2, chunks=4)) as pipe:
        plans = set()
        for enabled in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = pipe.step(X.to(dtype), target=Y, loss_fn=F.cross_entropy)
                expected = F.cross_entropy(plain(X.to(dtype)), Y)
            expected.backward()
            plans.add(id(pipe.build.plan))
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=1e-3)
        assert len(plans) == builds
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-3)
