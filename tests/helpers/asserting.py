"""Parts of a model that assert something. pytest writes the assertions of test modules in another way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
