"""Ops on parameters of which a process has some rows: results, gradients, and what is in memory when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime.autograd.gathered_parameters import Gathered, Sharded, Shards, gathering_forward
from fxpipe.runtime.stage import Stage


class Twice:
    """The exchange of two processes that do the same, seen by the second."""

    def __init__(self, wholes: list[Tensor]) -> None:
        self.wholes, self.log = wholes, list[tuple[str, int]]()

    def gather(self, one: Sharded) -> Tensor:
        self.log.append(("gather", one.shards.number))
        return self.wholes[one.shards.number].detach().clone()

    def scatter(self, one: Sharded, gradient: Tensor) -> Tensor:
        self.log.append(("scatter", one.shards.number))
        return 2 * gradient[one.shards.rows[0] :]


class Own(Stage):
    states = ("first", "second")

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(F.linear(x, self.first))
        assert gathered.now == 0  # the op has let go of it
        wide = self.second.T
        y = h @ wide
        del wide
        return y, self.second.shape


gathered = Gathered()


def made(first: Tensor, second: Tensor) -> tuple[Stage, Twice]:
    """A stage that has the last rows of two parameters."""
    parts = {"first": first.detach()[2:].clone(), "second": second.detach()[3:].clone()}
    stage = Own({path: part.requires_grad_() for path, part in parts.items()}, {}, torch.device("cpu"))
    exchange = Twice([first, second])
    shared = {"first": Shards(0, (2, 2)), "second": Shards(1, (3, 2))}
    object.__setattr__(stage, "forward", gathering_forward(stage, shared, exchange, gathered))
    return stage, exchange


def test_ops_get_whole_parameters_and_keep_none() -> None:
    torch.manual_seed(0)
    first, second, x = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((4, 6), (5, 4), (3, 6)))
    stage, exchange = made(first, second)
    y, shape = stage.forward(x)
    assert shape == (5, 4)
    assert exchange.log == [("gather", 0), ("gather", 1)]
    assert gathered.now == 0
    assert gathered.peak == max(first.nbytes, second.nbytes)
    exchange.log.clear()
    y.square().sum().backward()
    assert exchange.log == [("gather", 1), ("scatter", 1), ("gather", 0), ("scatter", 0)]
    assert gathered.now == 0
    assert gathered.peak == max(first.nbytes, second.nbytes)
    got, x.grad = x.grad, None
    truth = torch.tanh(F.linear(x, first)) @ second.T
    torch.testing.assert_close(y, truth)
    truth.square().sum().backward()
    torch.testing.assert_close(got, x.grad)
    torch.testing.assert_close(stage.tensor("first").grad, 2 * first.grad[2:])
    torch.testing.assert_close(stage.tensor("second").grad, 2 * second.grad[3:])


def test_without_gradients_nothing_is_scattered() -> None:
    first, second, x = torch.randn(4, 6), torch.randn(5, 4), torch.randn(3, 6)
    stage, exchange = made(first, second)
    with torch.no_grad():
        y, _ = stage.forward(x)
    torch.testing.assert_close(y, torch.tanh(F.linear(x, first)) @ second.T)
    stage.tensor("second").requires_grad_(False)
    stage.forward(x)[0].sum().backward()
    assert ("scatter", 1) not in exchange.log


def test_what_is_no_op_of_torch_cannot_compute_with_a_part() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, torch.ones(4, 6)

    class Strange(Own):
        def forward(self, x: Tensor) -> Any:
            return Double.apply(x, self.first)

    stage = Strange({"first": torch.randn(2, 6).requires_grad_(), "second": torch.randn(2, 4)}, {}, torch.device("cpu"))
    forward = gathering_forward(stage, {"first": Shards(0, (2, 2))}, Twice([torch.randn(4, 6)]), gathered)
    result = forward(torch.randn(3, 6, requires_grad=True))
    with pytest.raises(RuntimeError, match="expected device meta"):
        result.sum().backward()
