"""Stand-ins without memory: how a model is traced without being run.

torch's fake tensors would do, if it were not for guards: Dynamo looks at the arguments of every call to decide whether
what it captured still holds. So a call is captured with *hollow* tensors, of the same size, strides, dtype and device,
whose storage has been resized to nothing: those of the model hang in its twin (`twin.py`), those of the user stand
among the arguments (`call_arguments.py`). Dynamo cannot tell; nothing of the model's arithmetic can run; and the real
tensors may meanwhile be anywhere, on other devices too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

STAND_INS: Any = WeakIdKeyDictionary()  # a set; no attribute of a tensor, which would be taken for the user's


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
        order = _fastest_first(laid_out)
        # Strides of slower dimensions grow with the batch, so that a transposed batch stays dense.
        for slower in order[order.index(dim) + 1 :] if stride[dim] else ():
            stride[slower] = -(-stride[slower] * rows // size[dim])
        size[dim] = rows
    with torch.inference_mode(False), torch.no_grad():
        made = without_memory(size, stride, real.dtype, device or real.device)
        if made.dim() == 0:
            made.zero_()  # torch looks at the item of a 0-dim tensor
        is_parameter = isinstance(real, nn.Parameter)
        made = nn.Parameter(made, requires_grad=False) if is_parameter else made
        return _marked(made).requires_grad_(real.requires_grad)


def _marked(made: Tensor) -> Tensor:
    STAND_INS[made] = True
    return made


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor stands for another one, so that its item is not that of the model or the user."""
    return tensor in STAND_INS


def without_memory(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Such a tensor; one of no dimensions has memory."""
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if made.dim() and made.device.type != "meta":
        made.untyped_storage().resize_(0)
    return made


def like_traced(fake: Tensor) -> Tensor:
    """A tensor without memory like a fake one: a size that varies is that of the traced call, one that depends on data
    is 1."""
    return _marked(without_memory(traced_sizes(fake.shape), traced_sizes(fake.stride()), fake.dtype, fake.device))


def traced_sizes(sizes: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
    """Sizes or strides of the traced call."""
    return tuple(map(_hint, sizes))


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return size


def dense(real: Tensor) -> Tensor:
    """The tensor itself if its elements lie without gaps, in any order of dimensions; else a copy without gaps, or a
    view, if only the stride of a dimension of size one tells of gaps. Those, as in `x[:, :-1]`, would become numbers in
    the graph that depend on how the caller made the tensor.

    >>> whole = torch.ones(2, 3)
    >>> dense(whole.t()).stride(), dense(whole[:, :2]).stride(), dense(whole[:1, :2]).stride()
    ((1, 3), (2, 1), (2, 1))
    """
    if real.layout is not torch.strided or (real.is_contiguous() and 1 not in real.shape):
        return real
    order, length, lengths, ones = _fastest_first(real), 1, {1}, set[int]()
    for stride, size in ((real.stride(dim), real.shape[dim]) for dim in order):
        if size == 1:
            ones.add(stride)
        elif stride:  # an expanded dimension has no elements of its own
            if stride != length:
                return real.contiguous()
            length *= size
            lengths.add(length)
    if ones <= lengths:
        return real
    slowest_first = order[::-1]
    laid_out = real.permute(slowest_first)
    return laid_out.view(laid_out.shape).permute([slowest_first.index(dim) for dim in range(real.dim())])


def _fastest_first(real: Tensor) -> list[int]:
    """The dimensions by their strides; of equal ones, as beside a dimension of size one, the last first."""
    strides = real.stride()
    return sorted(range(real.dim()), key=lambda dim: (strides[dim], -dim))
