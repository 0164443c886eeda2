"""The layout of memory that generated backward counts on: dense, with the strides of a new tensor.

Kernels choose how they compute, and what their results look like, by strides. These are not unique where a size is 1:
a weight `[8, 4, 1, 1]` is contiguous both as it is made and after `to(memory_format=torch.channels_last)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError


def is_contiguous(x: Tensor) -> bool:
    """Whether the tensor is certain to have the strides of a new tensor of its shape."""
    return x.layout is torch.strided and 1 not in x.shape and x.is_contiguous()


def contiguous(x: Tensor) -> Tensor:
    """The tensor with the strides of a new tensor of its shape: itself, a view of it, or a copy. Raises FxpipeError for
    a sparse tensor.

    >>> import torch
    >>> weight = torch.zeros(8, 4, 1, 1).to(memory_format=torch.channels_last)
    >>> weight.is_contiguous(), weight.stride(), contiguous(weight).stride()
    (True, (4, 1, 4, 4), (4, 1, 1, 1))
    """
    if x.layout is not torch.strided:
        raise FxpipeError(
            f"a stage reads a sparse tensor of shape {[*x.shape]}, and backward='code' computes with dense ones: write "
            "backward='autograd', or x.to_dense()"
        )
    if not x.is_contiguous():
        x = x.contiguous()
    if 1 in x.shape and x.dim() > 1:
        new = x.view(-1).view(x.shape)
        return x if new.stride() == x.stride() else new
    return x


def all_contiguous(values: Sequence[Any]) -> bool:
    """Whether all tensors among the values are certain to be contiguous; False if one is missing (None)."""
    for x in values:
        if isinstance(x, Tensor):
            if x.layout is not torch.strided or 1 in x.shape or not x.is_contiguous():  # a call takes as long as these
                return False
        elif x is None:
            return False
    return True


def contiguous_ones(values: Sequence[Any]) -> Sequence[Any]:
    """The values, with their tensors as `contiguous` makes them."""
    if all_contiguous(values):
        return values
    return [contiguous(x) if isinstance(x, Tensor) else x for x in values]


def ordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor, dense in memory, with its dimensions in this order from the largest stride to the smallest; an empty
    `order` means contiguous.

    >>> import torch
    >>> ordered(torch.zeros(2, 3, 4), (0, 2, 1)).stride()
    (12, 1, 3)
    """
    return contiguous(x.permute(*order)).permute(inverse(order)) if order else contiguous(x)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The order that undoes it."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
