"""Backward as code around what is kept whole: autograd computes the gradients of that alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import fxpipe
from fxpipe.runtime.autograd.generated_gradients import Vjp, gradients_of, with_vjp

pytestmark = pytest.mark.filterwarnings("ignore:.* is kept whole", "ignore:.*buffers")


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Router(nn.Module):
    """Its layers are used outside too, one of them in no run; it returns whole numbers and the sum of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor, y: Tensor, unused: None = None) -> dict[str, Tensor]:
        h = self.first(x) * self.scale
        if h.sum() > 1e6:
            h = self.never(h)
        return {"h": h + self.last(x), "sum": x + y, "best": h.argmax(-1)}


class Part(nn.Module):
    """It is given tensors in lists and dicts, one of them twice."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6)) if weight is None else weight

    def forward(self, x: Tensor, others: Sequence[Any]) -> Tensor:
        if x.sum().item() == 12345.0:
            return x * 0
        return Sine.apply(x * self.weight) + others[0] + others[1]["y"]  # type: ignore[no-any-return,no-untyped-call]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.router, self.head = nn.Linear(6, 6), Router(), nn.Linear(6, 4)
        self.part = Part()
        self.tied = Part(self.part.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        found = self.router(h, F.linear(h, self.router.first.weight), unused=None)
        g = self.part(found["h"], [h, {"y": found["sum"]}]) * self.part.weight
        g = g + self.tied(g, (g, {"y": h}))
        chosen = torch.relu(g) * F.one_hot(found["best"], 6).to(g.dtype)
        return F.cross_entropy(self.head(chosen), y, reduction="sum")


OPTIONS: Mapping[str, dict[str, Any]] = {
    "recomputation": {"devices": 2, "chunks": 3, "checkpoint": "except_last"},
    "one micro-batch": {"devices": 2, "chunks": 1, "checkpoint": "never"},
    "zero bubble": {"devices": 3, "chunks": 3, "checkpoint": "selective", "schedule": "zb-h1"},
    "interleaved": {"devices": 2, "chunks": 4, "schedule": "interleaved"},
    "pairs": {"devices": 2, "chunks": 4, "schedule": "dualpipe-v", "overlap_pairs": True},
    "compiled": {"devices": 2, "chunks": 2, "compile_stages": "eager"},
    "replicas": {"devices": 3, "chunks": 2, "replicas": (2, 1)},
}


QUICK = ("recomputation", "zero bubble")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS])
def test_steps_are_the_models(name: str) -> None:
    torch.manual_seed(0)
    model = Model().double()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 4, (8,))
    with closing(fxpipe.compile(model, **OPTIONS[name])) as pipe:
        for _ in range(2):
            expected = plain(x, y)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-9, atol=1e-9)
        assert all(stage.backward for stage in pipe.build.program.stages if stage.ops)
        assert "autograd computes the gradients of router" in str(pipe.explain())
        for (path, own), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), path
            if other.grad is not None:
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-9, msg=path)


def run(call: Callable[..., Any], of: Sequence[int], tensors: Sequence[Tensor], *args: Any) -> tuple[Any, ...]:
    return with_vjp(lambda own, given, _: call(*own, *given), of, tensors, args, {})


def numbers(grads: Sequence[Tensor | None]) -> list[Any]:
    return [grad if grad is None else grad.tolist() for grad in grads]


def test_gradients_have_memory_of_their_own() -> None:
    """One of them may be added to another later."""
    with torch.no_grad():
        total, vjp = run(torch.add, (0, 1), (), torch.randn(3), torch.randn(3))
    assert not total.requires_grad
    grad = torch.ones(3)
    found = gradients_of(vjp, grad)
    assert numbers(found) == [[1.0] * 3] * 2
    assert len({x.data_ptr() for x in (*found, grad) if x is not None}) == 3


def test_gradients_are_dense_and_results_too() -> None:
    x = torch.randn(3, 2)
    turned, vjp = run(torch.t, (0,), (), x)
    found = [*gradients_of(vjp, torch.ones(2, 3)), *gradients_of(run(torch.sum, (0,), (), x)[1], torch.ones(()))]
    assert numbers(found) == [[[1.0] * 2] * 3] * 2
    assert all(one is not None and one.is_contiguous() for one in (turned, *found))


def test_what_a_run_does_not_use_has_no_gradient() -> None:
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2)
    vjps = [run(lambda w, a: a * 2, (0, 1), (weight,), x)[1] for _ in range(2)]
    assert numbers(gradients_of(vjps[0], torch.ones(2))) == [None, [2.0, 2.0]]
    assert numbers(gradients_of(vjps[1], torch.ones(2), zeros=(0,))) == [[0.0, 0.0], [2.0, 2.0]]
    assert gradients_of(Vjp((x,), (weight,)), torch.ones(2)) == [None]  # nothing depends on a tensor with a gradient
    assert weight.grad is None
