"""torch.compile around a pipe, or around what uses one: the graph breaks at the pipe, and all is as without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe

X = torch.randn(4, 6)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(torch.sin(self.first(x))))).sum()


@pytest.fixture
def pipe() -> Iterator[fxpipe.Pipe]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    made = fxpipe.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), devices=2, chunks=2)
    yield made
    made.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_pipe(pipe: fxpipe.Pipe, backend: str) -> None:
    compiled = torch.compile(pipe, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), pipe.model(X))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_with_a_pipe_in_it(pipe: fxpipe.Pipe, backend: str) -> None:
    outer = Outer(pipe)
    plain = copy.deepcopy(outer)
    plain.inner = plain.inner.model
    compiled = torch.compile(outer, backend=backend)
    for _ in range(2):
        outer.zero_grad(), plain.zero_grad()
        given, wanted = compiled(X), plain(X)
        given.backward(), wanted.backward()
        torch.testing.assert_close(given, wanted)
        gradients = {name: parameter.grad for name, parameter in outer.named_parameters()}
        torch.testing.assert_close(gradients, {name: parameter.grad for name, parameter in plain.named_parameters()})


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "call": lambda pipe, x: pipe(x),
    "forward": lambda pipe, x: pipe.forward(x),
    "forward_only": lambda pipe, x: pipe.forward_only(x),
    "step": lambda pipe, x: pipe.step(x, loss_fn=lambda out: out.sum()),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_that_call_it(pipe: fxpipe.Pipe, name: str) -> None:
    def use(x: Tensor) -> Tensor:
        return CALLS[name](pipe, torch.cos(x) * 2) * 2

    torch.testing.assert_close(torch.compile(use, backend="eager")(X), use(X))


def test_where_no_break_is_allowed_the_error_says_why(pipe: fxpipe.Pipe) -> None:
    with pytest.raises(Exception, match=r"it runs a pipeline of fxpipe, which is compiled already"):
        torch.compile(Outer(pipe), backend="eager", fullgraph=True)(X)


def test_methods_show_their_own_signatures(pipe: fxpipe.Pipe) -> None:
    assert "loss_fn" in signature(pipe.step).parameters
    assert list(signature(pipe.forward).parameters) == ["input"]
