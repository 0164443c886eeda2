"""Saved tensors in host memory. The CPU takes the part of the device where only the logic is in question."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.runtime.autograd.offload import Moved, Offload, offload

CPU = torch.device("cpu")


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1))
    return model, torch.randn(4, 8, requires_grad=True)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))


def test_refused_without_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"from an accelerator to host memory, and this stage is on cpu"):
        offload(CPU)


@pytest.mark.parametrize("small", [0, 100, 1 << 20])
def test_gradients_are_the_same(small: int) -> None:
    model, x = model_and_input()
    expected = gradients(model, x)
    with Offload(CPU, None, model.parameters(), small):
        found = gradients(model, x)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_graph_can_be_walked_twice() -> None:
    x = torch.randn(3, requires_grad=True)
    with Offload(CPU, None, small=0):
        y = (x.sin() * x.cos()).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    second = torch.autograd.grad(y, x)
    assert torch.equal(first[0], second[0])


def test_the_one_before_is_on_its_way() -> None:
    a, b = torch.randn(3), torch.randn(3)
    first = Moved(a, None, None)
    second = Moved(b, None, first)
    assert (first.here, second.here) == (None, None)
    assert torch.equal(second.give(), b)
    assert second.here is None
    assert first.here is not None
    assert torch.equal(first.give(), a)


def test_parameters_and_small_tensors_stay() -> None:
    weight = torch.randn(8, 8)
    hooks = Offload(CPU, None, (weight,), small=100)
    assert isinstance(hooks.pack(weight.t()), Tensor)
    assert isinstance(hooks.pack(torch.randn(24)), Tensor)
    assert isinstance(hooks.pack(torch.randn(26)), Moved)
    assert isinstance(hooks.pack(torch.randn(26).to_sparse()), Tensor)


def test_memory_layout_is_kept() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert Moved(x, None, None).give().stride() == x.stride()


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_gradients_are_the_same_on_a_gpu() -> None:
    device = torch.device("cuda")
    model, _ = model_and_input()
    model.to(device)
    hooks = offload(device, model.parameters())
    hooks.small = 0
    for _ in range(20):
        x = torch.randn(512, 8, device=device, requires_grad=True)
        expected = gradients(model, x)
        with hooks:
            y = model(x).square().sum()
        torch.empty(1 << 20, device=device).fill_(float("nan"))  # where freed memory is used again
        found: Any = torch.autograd.grad(y, (x, *model.parameters()))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.cuda
def test_memory_of_the_device_is_free_in_between() -> None:
    device, mb = torch.device("cuda"), 1 << 20
    x = torch.randn(16 * mb // 4, device=device, requires_grad=True)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    with offload(device, (x,)):
        y = x.sin().sin().sin().sin()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(device) - before == 16 * mb  # y alone
    y.sum().backward()
    assert x.grad is not None
