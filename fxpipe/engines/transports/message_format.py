"""One value on its way from one process to another: a buffer of known size, with a word in front.

    | word | ....... | elements of the tensor, in the order in which they lie in memory |

Both sides know the size from the value's type. The word says the rest:

- whether the value needs a gradient;
- whether there is a value at all: a gradient may be missing;
- the order of its dimensions in memory, on which a model may rely when it takes views;
- whether the sender has failed: then the elements have no meaning, and all ranks go on to the end of the step, so that
  no message is left over.

A word in the memory of an accelerator could only be read after the host has waited for it. There the elements go alone,
as bytes, and the word goes beside them, as a message between hosts that has no elements (`WORD`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.program.messages import HEAD

FAILED, MISSING, GRAD, ORDERED = 1, 2, 4, 8
DIMS = 14  # the most dimensions whose order fits into the word

Size = tuple[torch.dtype, tuple[int, ...]]
WORD: Size = torch.int64, (0,)


class FailedElsewhere(Exception):
    """The sender of a message has failed. The engine never raises it to the user."""


def blank(size: Size) -> Tensor:
    """A buffer in host memory for a value of this type and shape."""
    return torch.empty(length(size), dtype=size[0])


def length(size: Size) -> int:
    """The number of elements of a message, the word included."""
    return _layout(size)[0]


def nbytes(size: Size) -> int:
    """The bytes of a message."""
    return length(size) * size[0].itemsize


def failure(buffer: Tensor) -> Tensor:
    """The message that the sender has failed, written into `buffer`."""
    _write(buffer, FAILED)
    return buffer


def seal(value: Any, grad: bool, size: Size, buffer: Tensor) -> Tensor:
    """Write a value into `buffer` as a message: a tensor, a number, or None for a missing gradient. Raises ValueError
    if its shape or type is not `size`."""
    word = GRAD * grad
    if value is None:
        word |= MISSING
    elif not isinstance(value, Tensor):
        _elements(buffer, size).fill_(value)
    else:
        order, laid = _laid_out(value, size)
        word |= order
        _elements(buffer, (size[0], tuple(laid.shape))).copy_(laid)
    _write(buffer, word)
    return buffer


def read(buffer: Tensor, size: Size, number: str | None) -> Any:
    """The value of a message: a leaf that needs a gradient if the sent value did, a number of type `number`, or None
    for a missing gradient. Raises FailedElsewhere if the sender has failed."""
    word = _word(buffer)
    if number is not None and not word & (FAILED | MISSING):
        found = _elements(buffer, size).item()
        return bool(found) if number == "bool" else found
    return _opened(word, size, lambda shape: _elements(buffer, (size[0], shape)))


def apart(value: Tensor | None, grad: bool, size: Size, buffer: Tensor) -> Tensor | None:
    """Write the word of a value into `buffer`; returns its elements as flat bytes, which may be the value's own memory,
    or None for a missing gradient. Raises ValueError if its shape or type is not `size`."""
    if value is None:
        _write(buffer, GRAD * grad | MISSING)
        return None
    order, laid = _laid_out(value, size)
    _write(buffer, GRAD * grad | order)
    return as_bytes(laid)


def together(buffer: Tensor, size: Size, elements: Callable[[], Tensor]) -> Any:
    """The value of a word in `buffer` and of its elements, flat bytes; see `read`."""
    return _opened(_word(buffer), size, lambda shape: elements().view(size[0]).view(shape))


def say(buffer: Tensor, marks: tuple[bool, bool, bool]) -> Tensor:
    """Write the word of a part of a sum: whether its rank has failed, has a part, and the part needs a gradient."""
    failed, there, grad = marks
    _write(buffer, FAILED * failed | MISSING * (not there) | GRAD * grad)
    return buffer


def said(buffer: Tensor) -> tuple[bool, bool, bool]:
    """The marks in a word of `say`."""
    word = _word(buffer)
    return bool(word & FAILED), not word & MISSING, bool(word & GRAD)


def as_bytes(value: Tensor) -> Tensor:
    """The elements of a tensor as flat bytes."""
    return value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _laid_out(value: Tensor, size: Size) -> tuple[int, Tensor]:
    """The tensor with its dimensions in the order in which they lie in memory, and what the word says of that order.
    Raises ValueError if its shape or type is not `size`."""
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.dtype != size[0] or value.shape != size[1]:
        raise ValueError(
            f"a value of type {value.dtype} and shape {list(value.shape)} was to be sent to another rank, where "
            f"{size[0]} and {list(size[1])} is expected: its type or shape depends on the data"
        )
    order = order_of(value)
    if order is None:
        return 0, value
    return ORDERED | sum(dim << (4 + 4 * place) for place, dim in enumerate(order)), value.permute(order)


def _opened(word: int, size: Size, elements: Callable[[tuple[int, ...]], Tensor]) -> Tensor | None:
    """The value that a word says, of its elements in a shape."""
    if word & FAILED:
        raise FailedElsewhere
    if word & MISSING:
        return None
    if word & ORDERED:
        order = [word >> (4 + 4 * place) & 15 for place in range(len(size[1]))]
        value = elements(tuple([size[1][dim] for dim in order]))
        value = value.permute(sorted(range(len(order)), key=order.__getitem__))
    else:
        value = elements(size[1])
    return value.requires_grad_() if word & GRAD else value


def order_of(value: Tensor) -> list[int] | None:
    """The dimensions from the largest stride to the smallest, for a tensor that is dense but not contiguous; else
    None."""
    if value.is_contiguous() or value.dim() > DIMS:
        return None
    stride = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (-stride[dim], dim))
    return order if value.permute(order).is_contiguous() else None


def _write(buffer: Tensor, word: int) -> None:
    ctypes.c_int64.from_address(buffer.data_ptr()).value = word  # ten times as fast as by a tensor


def _word(buffer: Tensor) -> int:
    return ctypes.c_int64.from_address(buffer.data_ptr()).value


def _elements(buffer: Tensor, size: Size) -> Tensor:
    _, strides, first = _layout(size)
    return buffer.as_strided(size[1], strides, first)


@lru_cache(4096)
def _layout(size: Size) -> tuple[int, tuple[int, ...], int]:
    """The number of elements of a message, the strides of the value in it, and the offset of its first element."""
    dtype, shape = size
    first = HEAD // dtype.itemsize
    return first + prod(shape), tuple([max(1, prod(shape[dim + 1 :])) for dim in range(len(shape))]), first
