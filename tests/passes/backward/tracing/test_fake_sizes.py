"""Sizes as the ops of a generated backward have them."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, ToFloat

import fxpipe
from fxpipe.passes.backward.tracing.fake_sizes import Sizes, in_whole_numbers

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


class CausalConvolution(nn.Module):
    """As in state-space layers. torch asks for 16 or more samples, to choose a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Conv1d(6, 6, 4, padding=3, groups=6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.transpose(1, 2))[:, :, : x.shape[1]]
        return self.out(mixed.transpose(1, 2))  # type: ignore[no-any-return]


class Enlarged(nn.Module):
    """Torch asks for 16 or more samples where it enlarges an image."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 13, 3, padding=1), nn.Linear(13, 13)

    def forward(self, x: Tensor) -> Tensor:
        large = functional.interpolate(self.into(x), scale_factor=2.0, mode="nearest")
        return self.out(large.flatten(2).transpose(1, 2)).square().mean()  # type: ignore[no-any-return]


def test_code_holds_for_batches_on_both_sides_of_a_number_that_torch_asks_for() -> None:
    model, loss_fn = CausalConvolution().double(), nn.MSELoss()
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, devices=1, chunks=1, backward="code")) as pipe:
        for rows in (4, 20, 15, 16):
            x = torch.randn(rows, 5, 6, dtype=torch.float64)
            model.zero_grad()
            plain.zero_grad()
            expected = loss_fn(plain(x), x)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, target=x, loss_fn=loss_fn), expected)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            assert pipe.files["stage0.py"].count("slice_backward(") == 1  # `[:]` twice is no work


def test_code_of_a_stage_whose_sizes_become_numbers_in_one_of_its_traces() -> None:
    torch.manual_seed(0)
    model = Enlarged().double()
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, devices=2, chunks=1, cut=["out"])) as pipe:
        for rows in (4, 13, 17):  # as many as there are channels, too
            x = torch.randn(rows, 3, 4, 4, dtype=torch.float64)
            model.zero_grad()
            plain.zero_grad()
            expected = plain(x)
            expected.backward()
            torch.testing.assert_close(pipe.step(x), expected)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
        assert not any(stage.autograd_because for stage in pipe.build.program.stages)


def test_sizes_that_are_given() -> None:
    sizes = Sizes(("b", "seq"), (), given={"b": 4}, conditions=("seq == 2*b",))
    assert (sizes.primes, sizes.fixed) == ({}, {"seq": 8})
    assert sizes.text(sizes.values["b"] * 3) == "3*b"
    assert sizes.text(12) == 12
    assert Sizes(("b", "seq"), (), given={"b": 4}, conditions=("seq == b",)).equal == {"seq": "b"}
    assert [Sizes(("b",), numbers, given={"b": 13}).text(39) for numbers in ((), (26,))] == ["3*b", 39]


@pytest.mark.parametrize("fitting", [False, True])
def test_a_size_is_not_taken_to_be_the_one_that_is_given(fitting: bool) -> None:
    every_small_prime = (3 * 5 * 7 * 11 * 13 * 29 * 31 * 61,)  # so that none fits
    sizes = Sizes(("b", "seq"), every_small_prime, given={"b": 13}, conditions=("seq <= 64",), fitting=fitting)
    assert not sizes.equal
    assert sizes.chosen["b"] == 13
    assert (sizes.chosen["seq"] <= 64) is fitting
