"""The layout of memory that generated backward counts on: contiguous, with the strides of a new tensor.

Kernels choose how they compute, and what their results look like, by strides. These are not unique where a size is 1:
a weight `[8, 4, 1, 1]` is contiguous both as it is made and after `to(memory_format=torch.channels_last)`.
"""

from __future__ import annotations

from torch import Tensor


def contiguous(x: Tensor) -> Tensor:
    """The tensor with the strides of a new tensor of its shape: itself, a view of it, or a copy.

    >>> import torch
    >>> weight = torch.zeros(8, 4, 1, 1).to(memory_format=torch.channels_last)
    >>> weight.is_contiguous(), weight.stride(), contiguous(weight).stride()
    (True, (4, 1, 4, 4), (4, 1, 1, 1))
    """
    if not x.is_contiguous():
        x = x.contiguous()
    if 1 in x.shape and x.dim() > 1:
        new = x.view(-1).view(x.shape)
        return x if new.stride() == x.stride() else new
    return x
