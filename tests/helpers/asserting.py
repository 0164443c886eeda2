"""Parts of a model that assert something. pytest writes the assertions of test modules in another way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Layers(nn.Module):
    """Equal layers, each of which asserts something about an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert (mask > 0).all(), "masks are positive"
        made: Tensor = self.down(torch.tanh(self.up(x))) * mask
        return x + made


def about_labels(self: Any, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    assert (labels < 20).all(), "labels are below 20"
    return x


def about_the_batch(self: Any, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Which is not so of a micro-batch alone."""
    assert labels.ne(25).sum() == labels.shape[0] * labels.shape[1], "labels are below 20"
    return x


def by_a_check(self: Any, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    torch._check(bool((labels < 20).all().item()), lambda: "labels are below 20")
    return x


def behind_a_write(self: Any, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    shown = labels.clone()
    shown[:, 0] = 1
    assert (shown < 20).all(), "labels are below 20"
    return x


def about_numbers(self: Any, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    assert (x == x).all(), "not a number"
    return x
