"""Saved bytes against what can be counted by hand."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.runtime.autograd.saved_tensors import Saved
from fxpipe.runtime.autograd.split_backward import input_gradient, weight_gradient


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def test_linear_and_relu() -> None:
    # linear keeps x (4 × 8), and its weight, which does not count; relu its result (4 × 16)
    fc, x = nn.Linear(8, 16), leaf(4, 8)
    with Saved(without=fc.parameters()) as saved:
        y = torch.relu(fc(x))
    assert saved.now == saved.peak == 4 * (4 * 8 + 4 * 16)
    y.sum().backward()
    del y
    assert saved.now == 0
    assert saved.peak == 4 * (4 * 8 + 4 * 16)


def test_parameters_count_unless_told() -> None:
    fc, x = nn.Linear(8, 16), leaf(4, 8)
    with Saved() as saved:
        y = fc(x)
    assert saved.now == 4 * (4 * 8 + 8 * 16)
    del y
    assert saved.now == 0


@pytest.mark.parametrize(
    ("op", "size"),
    [
        (lambda x: x.softmax(-1), 4 * 60),  # its result
        (lambda x: F.dropout(x, 0.5, True), 60 * 4),  # noise, scaled
        (lambda x: x * x, 4 * 60),  # x twice, once in memory
        (lambda x: x[:, :2] * x[:, 2:4], 4 * 60),  # two views of x
        (lambda x: x.sin() + x.cos(), 4 * 60),
        (lambda x: x.sigmoid().tanh(), 2 * 4 * 60),
        (lambda x: x + 1, 0),
        (lambda x: F.max_pool1d(x.view(1, 6, 10), 2, return_indices=True)[0], 4 * 60 + 8 * 30),
    ],
)
def test_by_hand(op: Callable[[Tensor], Tensor], size: int) -> None:
    x = leaf(6, 10)
    with Saved() as saved:
        y = op(x)
    assert saved.now == size
    y.sum().backward()
    expected, x.grad = x.grad, None
    assert saved.now == 0
    with Saved() as again:
        y = op(x)
    del y
    assert (again.now, again.peak) == (0, size)
    assert expected is not None


def test_several_micro_batches() -> None:
    # F0 F1 B0 F2 B1 B2: never more than two of them
    fc, saved = nn.Linear(3, 3, bias=False), Saved()
    saved = Saved(without=fc.parameters())
    under_way: list[Tensor] = []
    sizes = []
    for action in ("F", "F", "B", "F", "B", "B"):
        if action == "F":
            with saved:
                under_way.append(fc(leaf(5, 3)))
        else:
            under_way.pop(0).sum().backward()
        sizes.append(saved.now // (4 * 15))
    assert sizes == [1, 2, 1, 2, 1, 0]
    assert saved.peak == 2 * 4 * 15


def test_gradients_are_as_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.GRU(4, 4))
    x = leaf(6, 4)

    def gradients() -> Any:
        return torch.autograd.grad(model(x)[0].square().sum(), (x, *model.parameters()))

    expected = gradients()
    with Saved():
        found = gradients()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_writing_to_what_is_saved() -> None:
    x = leaf(3)
    with Saved():
        h = x * 1
        y = h.sin()
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_cycle_keeps_the_graph_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        x = leaf(3)
        with Saved() as saved:
            y = x.exp().exp()
        del y
        assert saved.now == 0
    finally:
        gc.enable()


def test_a_worker_counts_its_own() -> None:
    saved = [Saved(), Saved()]
    results: list[Any] = [None, None]

    def work(k: int) -> None:
        with saved[k]:
            results[k] = leaf(2 + k).sin()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [s.now for s in saved] == [8, 12]
    del results[:]
    assert [s.now for s in saved] == [0, 0]


def test_what_is_kept_elsewhere() -> None:
    saved, x = Saved(), torch.randn(4)
    kept = [saved.keep(x), saved.keep(x[1:])]
    assert saved.now == 16
    kept.pop()
    assert saved.now == 16
    kept.pop()
    assert saved.now == 0


def test_sparse() -> None:
    x = torch.eye(3).to_sparse().requires_grad_()
    saved = Saved()
    kept = saved.keep(x)
    assert saved.now == 3 * 4 + 2 * 3 * 8
    del kept
    assert saved.now == 0


# -- the halves of a backward -----------------------------------------------------------------------------------------


def test_between_the_halves() -> None:
    # x ── mm ── gelu ── mm ── softmax: the products' inputs are kept for the weights, all else is freed
    x, w, v = leaf(4, 5), leaf(5, 6), leaf(6, 7)
    grad = torch.randn(4, 7)

    def task() -> Tensor:
        return F.softmax(F.gelu(x @ w) @ v, -1)

    expected = torch.autograd.grad(task(), (x, w, v), grad)
    saved = Saved(without=(w, v))
    with saved:
        y = task()
    assert saved.now == 4 * (20 + 24 + 24 + 28)  # x, the input and the result of gelu, the result of softmax
    (gx,), weights = input_gradient((y,), (grad,), (x,), saved)
    del y
    assert saved.now == 4 * (20 + 24)
    weight_gradient(weights)
    assert saved.now == 0
    for a, b in zip((gx, w.grad, v.grad), expected, strict=True):
        assert torch.equal(a, b)


class Twice(torch.autograd.Function):
    """Looks at its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[0]


def test_functions_that_look_twice() -> None:
    x, w = leaf(3), leaf(3)
    with Saved() as saved:
        y = Twice.apply(x * w)
    expected = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    (gx,), weights = input_gradient((y,), (torch.ones(3),), (x,), saved)
    weight_gradient(weights)
    assert torch.equal(gx, expected[0])
    assert torch.equal(w.grad, expected[1])


def test_backward_again_after_letting_go() -> None:
    x, w = leaf(3), leaf(3)
    with Saved() as saved:
        y = (x * w).sin()
    input_gradient((y,), (torch.ones(3),), (x,), saved)
    with pytest.raises(RuntimeError, match="let go of their saved tensors"):
        y.sum().backward()
