"""Checkpoint and Recompute: gradients as without, recomputation at the right moment, nothing done twice."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.runtime import Draws, Stage, checkpoint
from fxpipe.runtime.caller_context import current_context

CPU = torch.device("cpu")


class Linear(Stage):
    states = ("fc.weight", "fc.bias")

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(F.linear(x, self.fc.weight, self.fc.bias)) * scale


def linear() -> Linear:
    return Linear({"fc.weight": nn.Parameter(torch.randn(3, 3)), "fc.bias": nn.Parameter(torch.randn(3))}, {}, CPU)


def run(stage: Stage, *args: Any, after: Tensor | None = None) -> Any:
    return checkpoint(stage, (0, 0), current_context(), after, *args)


def test_gradients_equal_those_without() -> None:
    stage, x = linear(), torch.randn(2, 3, requires_grad=True)
    y, _ = run(stage, x, 2.0)
    expected = stage.forward(x, 2.0)
    assert torch.equal(y, expected)
    wanted = (x, stage.fc.weight, stage.fc.bias)
    for a, b in zip(torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(expected.sum(), wanted), strict=True):
        assert torch.equal(a, b)
    assert all(tensor.grad is None for tensor in wanted)


def test_backward_twice_with_retain_graph() -> None:
    stage, x = linear(), torch.randn(2, 3, requires_grad=True)
    y, _ = run(stage, x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y.sum(), x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_recompute_does_not_wait_for_the_gradient() -> None:
    #   Checkpoint(0) ── y0 ── gradient 0 ──▶             y0's gradient goes through a function that autograd puts off
    #         └─ Recompute(0) ── Checkpoint(1) ──▶        as long as there is anything else to run
    log: list[str] = []

    class Noted(Linear):
        def forward(self, x: Tensor, name: str) -> Tensor:
            if torch.is_grad_enabled():
                log.append(f"F{name} again")
                x.register_hook(lambda grad: log.append(f"B{name}"))
            return super().forward(x)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            log.append("gradient 0")
            return grad

    stage = Noted({"fc.weight": nn.Parameter(torch.randn(3, 3)), "fc.bias": nn.Parameter(torch.randn(3))}, {}, CPU)
    x0, x1 = torch.randn(1, 3, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    y0, after = run(stage, x0, "0")
    with ThreadPoolExecutor(1) as fresh:  # its functions have the lowest numbers, so backward comes to them last
        y0 = fresh.submit(Gradient.apply, y0).result()
    y1, _ = run(stage, x1, "1", after=after)
    (y0 + y1).sum().backward()
    assert log == ["F1 again", "B1", "F0 again", "gradient 0", "B0"]


def test_frozen_parameters_and_inputs_need_no_gradient() -> None:
    stage = linear()
    stage.fc.bias.requires_grad_(False)
    x = torch.randn(2, 3)
    y, _ = run(stage, x)
    y.sum().backward()
    assert stage.fc.bias.grad is None
    assert x.grad is None
    expected = torch.autograd.grad(stage.forward(x).sum(), stage.fc.weight)[0]
    assert torch.equal(stage.fc.weight.grad, expected)


def test_nothing_needs_a_gradient() -> None:
    stage = linear()
    for parameter in stage.parameters():
        parameter.requires_grad_(False)
    y, _ = run(stage, torch.randn(2, 3))
    assert not y.requires_grad


class Mixed(Stage):
    """Gives a number, an integer tensor and a float without gradient beside the value."""

    states = ("w",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
        return x * self.w, x.argmax(1), x.shape[0], torch.ones(2)


def test_outputs_of_all_kinds() -> None:
    stage = Mixed({"w": nn.Parameter(torch.randn(3))}, {}, CPU)
    x = torch.randn(2, 3, requires_grad=True)
    y, index, size, mask, _ = run(stage, x)
    assert (index.dtype, size, mask.tolist()) == (torch.int64, 2, [1.0, 1.0])
    (y.sum() + mask.sum()).backward()
    assert torch.equal(x.grad, stage.w.detach().expand(2, 3))


class Dropout(Stage):
    def forward(self, x: Tensor, draw: Draws) -> Tensor:
        with draw(0):
            x = F.dropout(x, 0.5, True)
        return x * x


def test_dropout_is_repeated_whatever_else_draws() -> None:
    stage, x = Dropout({}, {}, CPU), torch.ones(64, requires_grad=True)
    y, _ = run(stage, x, Draws(5, 0, CPU))
    torch.manual_seed(1)
    torch.rand(3)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(x.grad, y * 2)  # 0 where dropped, else 2 * 2 * 2
    assert torch.equal(torch.get_rng_state(), before)


class Counting(Stage):
    """Adds its input to a buffer, and uses what the buffer held before."""

    states = ("total", "w")
    mutates = ("total",)
    rereads = ("total",)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w + self.total
        self.total.add_(1)
        return y * y


def test_buffers_are_written_once_and_read_as_in_forward() -> None:
    total, w = torch.zeros(()), nn.Parameter(torch.tensor(3.0))
    stage = Counting({"total": total, "w": w}, {}, CPU)
    y0, after = run(stage, torch.tensor(2.0))
    y1, _ = run(stage, torch.tensor(5.0), after=after)
    assert total.item() == 2
    (y0 + y1).backward()
    assert total.item() == 2
    assert stage.total is total
    # d/dw (2w + 0)^2 + (5w + 1)^2 at w = 3
    assert w.grad.item() == 2 * 6 * 2 + 2 * 16 * 5


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_of_forward_is_that_of_recomputation(outside: bool) -> None:
    seen = []

    class Cast(Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.fc.weight, self.fc.bias)
            seen.append(y.dtype)
            return y.float()

    stage = Cast({"fc.weight": nn.Parameter(torch.randn(3, 3)), "fc.bias": nn.Parameter(torch.randn(3))}, {}, CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
        y, _ = run(stage, torch.randn(2, 3))
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        y.sum().backward()
    assert seen == [torch.float32 if outside else torch.bfloat16] * 2
    assert stage.fc.weight.grad.abs().sum() > 0


def test_activations_are_freed_after_backward() -> None:
    stage, x = linear(), torch.randn(2, 3, requires_grad=True)
    inner = x * 2
    y = run(stage, inner)[0]
    freed = weakref.ref(inner)
    del inner
    gc.disable()
    try:
        y.sum().backward()
        assert freed() is None
    finally:
        gc.enable()


def test_an_error_in_recomputation_says_where() -> None:
    class Fails(Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise KeyError("again")
            return super().forward(x)

    stage = Fails({"fc.weight": nn.Parameter(torch.randn(3, 3)), "fc.bias": nn.Parameter(torch.randn(3))}, {}, CPU)
    y, _ = checkpoint(stage, (2, 5), current_context(), None, torch.randn(1, 3))
    with pytest.raises(KeyError) as caught:
        y.sum().backward()
    assert caught.value.__notes__ == ["stage 2, micro-batch 5"]


def test_a_hook_on_a_parameter_sees_the_whole_gradient_once() -> None:
    """torch.autograd.grad runs hooks too, so a recomputation must not ask it for the parameters themselves."""
    stage, x = linear(), torch.randn(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(stage.forward(x).sum(), stage.fc.weight)
    seen: list[Tensor] = []

    def hook(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 10

    stage.fc.weight.register_hook(hook)
    run(stage, x)[0].sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(stage.fc.weight.grad, expected * 10)


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    stage = linear()
    y, _ = run(stage, torch.randn(2, 3, requires_grad=True))
    with torch.no_grad():
        stage.fc.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"fc\.bias changed in place between forward and backward"):
        y.sum().backward()
