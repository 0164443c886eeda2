"""Stand-ins without memory: how a model is traced without being run.

torch's fake tensors would do, if it were not for guards: Dynamo looks at the arguments of every call to decide whether
what it captured still holds. So a call is captured with *hollow* tensors, of the same size, strides, dtype and device,
whose storage has been resized to nothing: those of the model hang in its twin (`twin.py`), those of the user stand
among the arguments (`call_arguments.py`). Dynamo cannot tell; nothing of the model's arithmetic can run; and the real
tensors may meanwhile be anywhere, on other devices too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def hollow(real: Tensor, device: torch.device | None = None, batch: tuple[int, int] | None = None) -> Tensor:
    """A tensor like `real` without memory, on `device`; `batch` is (dimension, size): that dimension has that size.

    >>> twin = hollow(torch.ones(2, 3))
    >>> twin.shape, twin.untyped_storage().nbytes()
    (torch.Size([2, 3]), 0)
    """
    laid_out = real if real.layout is torch.strided else torch.empty(real.shape, device="meta")  # a sparse tensor
    size, stride = list(real.shape), list(laid_out.stride())
    if batch is not None and size[batch[0]] != batch[1]:
        dim, rows = batch
        # Strides of slower dimensions grow with the batch, so that a transposed batch stays dense.
        stride = [-(-s * rows // size[dim]) if s > stride[dim] > 0 else s for s in stride]
        size[dim] = rows
    with torch.inference_mode(False), torch.no_grad():
        made = without_memory(size, stride, real.dtype, device or real.device)
        if made.dim() == 0:
            made.zero_()  # Dynamo remembers the item of a 0-dim tensor
        if isinstance(real, nn.Parameter):
            return nn.Parameter(made, requires_grad=real.requires_grad)
        return made.requires_grad_(real.requires_grad)


def without_memory(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Such a tensor; one of no dimensions has memory."""
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if made.dim() and made.device.type != "meta":
        made.untyped_storage().resize_(0)
    return made


def dense(real: Tensor) -> Tensor:
    """The tensor itself if its elements lie without gaps, in any order of dimensions; else a copy without gaps.
    They, as in `x[:, :-1]`, would become numbers in the graph that depend on how the caller made the tensor.

    >>> whole = torch.ones(2, 3)
    >>> dense(whole.t()).stride(), dense(whole[:, :2]).stride()
    ((1, 3), (2, 1))
    """
    if real.layout is not torch.strided or real.is_contiguous():
        return real
    length = 1
    for stride, size in sorted(zip(real.stride(), real.shape, strict=True)):
        if stride == 0 or size == 1:  # an expanded dimension has no elements of its own
            continue
        if stride != length:
            return real.contiguous()
        length *= size
    return real
