"""The sliding windows of convolutions and pools, from the arguments of the op: used where a model is read as operators
and where operators are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fxpipe.ir.graph.graph import Op, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import MAX_POOLS


class Windows(NamedTuple):
    """One number for each dimension that the windows slide over.

    - `size`: elements from the first to the last of a window, dilation included.
    - `stride`: elements from one window to the next.
    - `before`: elements of padding before the image.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]


def of_convolution(op: Op, kernel: Sequence[int]) -> Windows:
    """The windows of a convolution with weights of this height and width."""
    rank, padding = len(kernel), argument(op, 4, "padding", 0)
    size = wide(kernel, numbers(argument(op, 5, "dilation", 1), rank))
    named = {"same": tuple((one - 1) // 2 for one in size), "valid": (0,) * rank}
    before = named[padding] if isinstance(padding, str) else numbers(padding, rank)
    return Windows(size, numbers(argument(op, 3, "stride", 1), rank), before)


def of_pool(op: Op, rank: int) -> Windows:
    """The windows of a pool over `rank` dimensions."""
    kernel = numbers(argument(op, 1, "kernel_size"), rank)
    dilation = argument(op, 4, "dilation", 1) if op_name(op) in MAX_POOLS else 1
    stride, before = argument(op, 2, "stride") or kernel, argument(op, 3, "padding", 0)
    return Windows(wide(kernel, numbers(dilation, rank)), numbers(stride, rank), numbers(before, rank))


def wide(kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """The sizes of windows of `kernel` elements, `dilation` apart.

    >>> wide((3, 3), (1, 2))
    (3, 5)
    """
    return tuple((size - 1) * apart + 1 for size, apart in zip(kernel, dilation, strict=True))


def numbers(given: Any, rank: int) -> tuple[int, ...]:
    """One number for each dimension, from one number, a sequence of one, or a sequence of `rank`.

    >>> numbers(3, 2), numbers((3,), 2), numbers([3, 1], 2)
    ((3, 3), (3, 3), (3, 1))
    """
    several = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return several if len(several) == rank else several * rank
