"""One value on its way from one process to another: a buffer of known size, with a word in front.

    | word | ....... | elements of the tensor, in the order in which they lie in memory |

The size follows from the value's type. What does not is in the word: whether the value needs a gradient, whether there
is one at all (a gradient may be missing), in what order its dimensions lie in memory (a model may rely on it when it
takes views), and whether the sender has failed: then the rest means nothing, and everybody goes on to the end of the
step, so that no message is left over.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

HEAD = 64  # bytes, so that elements are aligned
FAILED, MISSING, GRAD, ORDERED = 1, 2, 4, 8
DIMS = 14  # at most, for which the word has room

Size = tuple[torch.dtype, tuple[int, ...]]


class FailedElsewhere(Exception):
    """The sender of a message has failed. Never leaves the engine."""


def blank(size: Size, device: torch.device) -> Tensor:
    """A buffer for a value of this type and shape."""
    return torch.empty(length(size), dtype=size[0], device=device)


def length(size: Size) -> int:
    """How many elements a message has, with the word."""
    return _layout(size)[0]


def nbytes(size: Size) -> int:
    """The memory of a message."""
    return length(size) * size[0].itemsize


def failure(buffer: Tensor) -> Tensor:
    """The message that there is none."""
    _write(buffer, FAILED)
    return buffer


def seal(value: Any, grad: bool, size: Size, buffer: Tensor) -> Tensor:
    """A tensor, a number, or None for a gradient that is missing, as a message. Raises ValueError if it has not the
    shape or type that was known for it."""
    word = GRAD * grad
    if value is None:
        word |= MISSING
    elif not isinstance(value, Tensor):
        _elements(buffer, size).fill_(value)
    else:
        if value.layout is not torch.strided:
            value = value.to_dense()
        if value.dtype != size[0] or value.shape != size[1]:
            raise ValueError(
                f"a value of type {value.dtype} and shape {list(value.shape)} was to be sent to another rank, where "
                f"{size[0]} and {list(size[1])} is expected: its type or shape depends on the data"
            )
        order = _order(value)
        if order is None:
            _elements(buffer, size).copy_(value)
        else:
            word |= ORDERED | sum(dim << (4 + 4 * place) for place, dim in enumerate(order))
            _elements(buffer, (size[0], tuple(value.shape[dim] for dim in order))).copy_(value.permute(order))
    _write(buffer, word)
    return buffer


def read(buffer: Tensor, size: Size, number: str | None) -> Any:
    """What a message brings: a leaf that needs a gradient if the value did, or None. Raises FailedElsewhere."""
    word = _word(buffer)
    if word & FAILED:
        raise FailedElsewhere
    if word & MISSING:
        return None
    if number is not None:
        found = _elements(buffer, size).item()
        return bool(found) if number == "bool" else found
    if word & ORDERED:
        order = [word >> (4 + 4 * place) & 15 for place in range(len(size[1]))]
        value = _elements(buffer, (size[0], tuple(size[1][dim] for dim in order)))
        value = value.permute(sorted(range(len(order)), key=order.__getitem__))
    else:
        value = _elements(buffer, size)
    return value.requires_grad_() if word & GRAD else value


def _order(value: Tensor) -> list[int] | None:
    """The dimensions from the slowest to the fastest, if the tensor is dense, but not in the usual order."""
    if value.is_contiguous() or value.dim() > DIMS:
        return None
    stride = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (-stride[dim], dim))
    return order if value.permute(order).is_contiguous() else None


def _write(buffer: Tensor, word: int) -> None:
    if buffer.is_cpu:  # ten times as fast as by a tensor
        ctypes.c_int64.from_address(buffer.data_ptr()).value = word
    else:
        buffer[: HEAD // buffer.itemsize].view(torch.int64)[0] = word


def _word(buffer: Tensor) -> int:
    if buffer.is_cpu:
        return ctypes.c_int64.from_address(buffer.data_ptr()).value
    return int(buffer[: HEAD // buffer.itemsize].view(torch.int64)[0])


def _elements(buffer: Tensor, size: Size) -> Tensor:
    _, strides, first = _layout(size)
    return buffer.as_strided(size[1], strides, first)


@lru_cache(4096)
def _layout(size: Size) -> tuple[int, tuple[int, ...], int]:
    """How many elements a message has, how far apart those of each dimension lie, and where they begin."""
    dtype, shape = size
    first = HEAD // dtype.itemsize
    return first + prod(shape), tuple([max(1, prod(shape[dim + 1 :])) for dim in range(len(shape))]), first
