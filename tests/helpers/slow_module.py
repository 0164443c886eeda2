"""A module whose ops take a given time, which no estimate knows."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class Slow(nn.Module):
    """Takes a while, forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return slowly(x * self.weight, *self.seconds)


@torch.library.custom_op("fxpipe_tests::slowly", mutates_args=())
def slowly(x: Tensor, forward: float, backward: float) -> Tensor:
    time.sleep(forward)
    return x.clone()


@slowly.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    time.sleep(ctx.seconds)
    return grad, None, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[2]


slowly.register_autograd(_backward, setup_context=_setup)
