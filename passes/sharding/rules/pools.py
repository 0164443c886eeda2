"""Pooling: a part reads the rows that its windows reach; what stands for the rows outside of the image is put around it
at its outer border only, -inf for a maximum and 0 for a mean."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from fxpipe.ir.arguments import argument
from fxpipe.ir.graph import Op, Ref, op_name
from fxpipe.ir.strategy import Region
from fxpipe.ir.types import TensorType
from fxpipe.ir.windows import MAX, of_pool
from fxpipe.passes.sharding.building import Building, Part
from fxpipe.passes.sharding.regions import Places, extent
from fxpipe.passes.sharding.rule import Rule, each, every, with_arguments
from fxpipe.passes.sharding.rules.convolutions import Slides, padded

NAMES = ("input", "kernel_size", "stride", "padding")


def _is_max(op: Op) -> bool:
    return op_name(op) in MAX


def _cuts(b: Building, op: Op) -> Iterable[int]:
    """Any dimension, unless windows at the border are counted in another way, or their places are wanted, too."""
    if not isinstance(b.captured[op.name], TensorType):
        return ()
    before = any(_slides(b, op).before)
    plain = not argument(op, 4, "ceil_mode", False) and (not before or argument(op, 5, "count_include_pad", True))
    return every(b, op) if _is_max(op) or plain else (0, 1)


def _slides(b: Building, op: Op) -> Slides:
    sizes, left = (b.shape(name)[2:] for name in (argument(op, 0, "input").name, op.name))
    return Slides(sizes, left, *of_pool(op, len(sizes)))


def _make(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    x, slides = argument(op, 0, "input").name, _slides(b, op)
    outside = -inf if _is_max(op) else 0.0

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        area, pad = slides.reach(region[2:])
        image, padding = padded(b, op, b.gather(op, x, (*region[:2], *area), device), pad, outside, device)
        return op.target, *with_arguments(op, {"input": image, **padding}, NAMES)

    return each(b, op, places, call)


def _adaptive_cuts(b: Building, op: Op) -> Iterable[int]:
    """Any dimension in which all windows are alike."""
    sizes = zip(b.shape(op.args[0].name), b.shape(op.name), strict=True)
    return (0, 1, *(dim for dim, (size, left) in enumerate(sizes) if dim > 1 and size % left == 0))


def _make_adaptive(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    x = argument(op, 0, "input").name
    windows = [size // left for size, left in zip(b.shape(x)[2:], b.shape(op.name)[2:], strict=True)]

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        area = [
            (0, size) if left == (0, wanted) else (left[0] * window, left[1] * window)
            for left, window, size, wanted in zip(
                region[2:], windows, b.shape(x)[2:], b.shape(op.name)[2:], strict=True
            )
        ]
        image = Ref(b.gather(op, x, (*region[:2], *area), device))
        sizes = extent(region[2:])
        return op.target, (image, sizes if len(sizes) > 1 else sizes[0]), {}

    return each(b, op, places, call)


POOLS = {
    **dict.fromkeys((*sorted(MAX), "avg_pool1d", "avg_pool2d"), Rule(_make, _cuts)),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), Rule(_make_adaptive, _adaptive_cuts)),
}
