"""Sizes as the ops of a generated backward have them."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, ToFloat

import fxpipe
from fxpipe.passes.backward.tracing.fake_sizes import in_whole_numbers

N = sympy.Symbol("n", integer=True, positive=True)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (CeilToInt(FloatTrueDiv(ToFloat(-N) - ToFloat(N), sympy.Float(-1.0))), 2 * N),
        (CeilToInt(FloatTrueDiv(-2.0 * N, sympy.Float(-1.0))), 2 * N),
        (CeilToInt(ToFloat(N)), N),
        (2 * N + 1, 2 * N + 1),
    ],
)
def test_floats_in_sizes(size: object, wanted: object) -> None:
    assert in_whole_numbers(size) == wanted


def test_a_size_that_is_rounded_stays() -> None:
    half = CeilToInt(FloatTrueDiv(ToFloat(N), sympy.Float(2.0)))
    assert "CeilToInt" in str(in_whole_numbers(half))


class Relative(nn.Module):
    """Attends by distance, as XLNet: from n to -n."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.places = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        distances = torch.arange(count, -count, -1.0).to(x.dtype)
        keys = self.places(torch.sin(distances[:, None] * torch.ones(4, dtype=x.dtype)))
        h = self.into(x)
        scores = torch.einsum("bnd,md->bnm", h, keys).reshape(x.shape[0], 2 * count, count)[:, 1:]
        scores = scores.reshape(x.shape[0], count, 2 * count - 1)[:, :, :count]
        return (scores @ h).square().sum()


def test_distances_between_tokens() -> None:
    torch.manual_seed(0)
    model = Relative().double()
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, 2, 2, dynamic=True)) as pipe:
        for count in (5, 7):
            x = torch.randn(4, count, 4, dtype=torch.float64)
            plain(x).backward()
            pipe.step(x)
        assert not any(stage.autograd_because for stage in pipe.build.program.stages)
        for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-9)
