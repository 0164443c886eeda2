"""Copies and waits. Without a GPU: that autograd walks them back, and that no CPU stream is ever touched."""

from __future__ import annotations

import pytest
import torch

from fxpipe.runtime import copy, wait
from fxpipe.runtime.autograd.device_copy import Copy, Leave
from fxpipe.runtime.streams import Streams, current_stream, new_stream

CPU = torch.device("cpu")


def test_gradients_go_back() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    a, b = wait(None, None, *Copy.apply(None, None, CPU, *Leave.apply(None, None, x, y)))
    (a * 2 + b * 3).sum().backward()
    assert x.grad.tolist() == [2] * 3
    assert y.grad.tolist() == [3] * 3


def test_a_tensor_without_gradient_in_backward() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    a, _ = Copy.apply(None, None, CPU, *Leave.apply(None, None, x, y))
    wait(None, None, a).sum().backward()
    assert y.grad is None


def test_what_is_there_is_not_copied() -> None:
    x, y = torch.randn(3), torch.randn(3)
    assert copy(None, None, CPU, x) is x
    assert copy(None, None, CPU, x, y) == (x, y)


def test_the_cpu_has_no_streams() -> None:
    assert new_stream(CPU) is None
    assert current_stream(CPU) is None
    assert Streams((CPU, CPU))[1, 7] is None


@pytest.mark.cuda
def test_a_copy_waits_for_the_task_before() -> None:
    gpu = torch.device("cuda:0")
    compute, source, target = current_stream(gpu), new_stream(gpu), new_stream(gpu)
    x = torch.zeros(1 << 20, device=gpu, requires_grad=True)
    torch.cuda._sleep(50_000_000)
    y = x + 1
    source.wait_stream(compute)
    y = copy(source, None, CPU, y)
    assert y.device == CPU
    assert y.sum().item() == 1 << 20
    back = copy(None, target, gpu, y)
    wait(compute, target, back).sum().backward()
    assert x.grad.sum().item() == 1 << 20
