"""Gradients that are added up in place are nobody else's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpipe.runtime.autograd.unalias_gradients import unshare
from fxpipe.torch_internals.tensor_memory import is_shared


def leaf(n: int = 4) -> Tensor:
    return torch.zeros(n, requires_grad=True)


def test_a_view_of_the_gradient_that_is_passed_on() -> None:
    x, w, grad = leaf(), leaf(), torch.ones(2, 2)
    for first in (True, False):
        y = x.view(2, 2) + w.view(2, 2)
        (found,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        y.backward(grad, inputs=[w])
        if first:
            assert is_shared(w.grad)
            sent = found
            unshare([w])
            assert not is_shared(w.grad)
    assert torch.equal(w.grad, torch.full((4,), 2.0))
    assert torch.equal(sent, torch.ones(4))
    assert torch.equal(grad, torch.ones(2, 2))


def test_two_parameters_with_one_gradient() -> None:
    a, b = leaf(), leaf()
    for _ in range(3):
        (a.view(2, 2) + b.view(2, 2)).sum().backward()
        unshare([a, b])
    assert torch.equal(a.grad, torch.full((4,), 3.0))
    assert torch.equal(b.grad, torch.full((4,), 3.0))


def test_what_is_alone_stays() -> None:
    a, none = leaf(), leaf()
    (a * 2).sum().backward()
    grad = a.grad
    unshare([a, none])
    assert a.grad is grad
    assert none.grad is None


def test_sparse_gradients_are_left_alone() -> None:
    table = torch.zeros(5, 2, requires_grad=True)
    torch.nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True).sum().backward()
    grad = table.grad
    unshare([table])
    assert table.grad is grad
