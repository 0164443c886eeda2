"""fork and join against the order in which backward really runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.runtime import fork, join


class Log(torch.autograd.Function):
    """Passes x on, and writes a name down when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: list[str]) -> Tensor:
        ctx.name, ctx.log = name, log
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(ctx.name)
        return grad, None, None


def test_join_runs_before_fork() -> None:
    #   x ── B0 ── fork ── y ──▶          without the token, autograd runs B0, made last, before B1
    #                │
    #              token
    #                │
    #          x ── join ── B1 ──▶
    log: list[str] = []
    x = torch.ones(2, requires_grad=True)
    late = Log.apply(x, "B1 before", log)
    y = Log.apply(x, "B0", log)
    y, token = fork(y)
    late = Log.apply(join(token, late), "B1", log)
    (y + late).sum().backward()
    assert log == ["B1", "B1 before", "B0"] or log == ["B1", "B0", "B1 before"]
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_without_the_edge_the_order_is_another() -> None:
    log: list[str] = []
    x = torch.ones(2, requires_grad=True)
    late = Log.apply(x, "B1", log)
    y = Log.apply(x, "B0", log)
    (y + late).sum().backward()
    assert log == ["B0", "B1"]


def test_several_tensors_and_double_backward() -> None:
    x, z = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    a, b, token = fork(x * x, z * z)
    c, d = join(token, a, b)
    (first,) = torch.autograd.grad(c * d, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (2 * 3 * 4, 2 * 4)


def test_nothing_to_wait_for() -> None:
    x, y = torch.ones(1), torch.ones(1)
    assert join(None, x) is x
    assert join(None, x, y) == (x, y)


def test_token_has_no_elements_and_the_tensor_keeps_its_memory() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    y, token = fork(x)
    assert token.numel() == 0
    assert y.data_ptr() == x.data_ptr()
