"""Python numbers that a stage makes: others take them, the caller gets them, modules keep them for the next call."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.helpers.marks import mostly_slow

X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CALLS = 3  # from the second on, what the modules keep are inputs of the graph


class Numbers(nn.Module):
    """The first stage makes numbers of three types from what is kept of the last call; later ones use them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.calls, self.scale, self.odd = 0, 0.5, False

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        self.calls += 1
        self.scale = self.scale * 1.5
        self.odd = not self.odd
        factor = self.calls * x.shape[1]
        x = torch.tanh(self.layers[0](x) * factor)
        rows = x.shape[0]
        x = torch.tanh(self.layers[1](x)) * self.scale
        x = self.layers[2](x) * factor
        return (x if self.odd else -x), self.calls, factor, rows, x.shape[1]


class CountedLoss:
    """A loss that depends on how often it was called before."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: tuple[Any, ...], target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output[0], target) * self.calls


def twins() -> tuple[Numbers, Numbers]:
    """The model for the pipe, and the plain one."""
    torch.manual_seed(0)
    model = Numbers().double()
    return model, copy.deepcopy(model)


def assert_same(model: Numbers, plain: Numbers, parameters: Iterable[str] | None = None) -> None:
    """What the models keep, and the gradients of these parameters, by default of all."""
    assert (model.calls, model.scale, model.odd) == (plain.calls, plain.scale, plain.odd)
    for name in dict(model.named_parameters()) if parameters is None else parameters:
        torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad)


def steps_are_the_models(pipe: fxpipe.Pipe, plain: Numbers) -> None:
    """Some steps of the pipe, and of the plain model beside it."""
    loss_fn, plain_loss_fn = CountedLoss(), CountedLoss()
    for _ in range(CALLS):
        loss, outputs = pipe.step(X, target=X, loss_fn=loss_fn, outputs=True)
        expected = plain(X)
        expected_loss = plain_loss_fn(expected, X)
        expected_loss.backward()
        torch.testing.assert_close((loss, outputs), (expected_loss.detach(), expected))
        assert [type(x) for x in outputs] == [type(x) for x in expected]
    assert loss_fn.calls == plain_loss_fn.calls


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "replicas"),
    [
        pytest.param("gpipe", "never", None, marks=pytest.mark.slow),
        ("1f1b", "except_last", None),
        pytest.param("zb-h1", "always", None, marks=pytest.mark.slow),
        pytest.param("1f1b", "always", (1, 2, 1), marks=pytest.mark.slow),
        ("zb-h1", "never", (2, 1, 2)),
    ],
)
def test_steps(schedule: Any, checkpoint: Any, replicas: Any) -> None:
    model, plain = twins()
    options = {"schedule": schedule, "checkpoint": checkpoint, "replicas": replicas}
    with closing(fxpipe.compile(model, sum(replicas or (1, 1, 1)), 3, **options)) as pipe:
        steps_are_the_models(pipe, plain)
    assert_same(model, plain)


@pytest.mark.parametrize("checkpoint", mostly_slow(["never", "except_last", "always"], "always".__eq__))
def test_calls(checkpoint: Any) -> None:
    model, plain = twins()
    with closing(fxpipe.compile(model, devices=3, chunks=3, checkpoint=checkpoint)) as pipe:
        for _ in range(CALLS):
            outputs, expected = pipe(X), plain(X)
            torch.testing.assert_close(outputs, expected)
            assert [type(x) for x in outputs] == [type(x) for x in expected]
            for found in (outputs, expected):
                found[0].square().sum().backward()
    assert_same(model, plain)


def test_a_number_is_a_size_of_what_a_stage_makes() -> None:
    """As the length of a static cache is: from the second number on, the size is left open."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, times: int) -> Tensor:
            h = self.first(x)
            return self.last(h.new_ones(len(x), times, 4) * h[:, None]).sum(1)

    model, x = Repeats().double(), torch.randn(6, 4, dtype=torch.float64)
    pipe = fxpipe.compile(model, 2, 3, cut=["last"], schedule="1f1b")
    for times in (3, 4, 5):
        torch.testing.assert_close(pipe(x, times), model(x, times))
        loss = pipe.step(x, times, loss_fn=lambda out: out.square().mean())
        torch.testing.assert_close(loss, model(x, times).square().mean())
    pipe.close()
