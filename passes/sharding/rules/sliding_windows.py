"""Convolutions: a part has its own output channels, so its own rows of the weights. It reads the rows of the image that
its windows reach, also beyond its own edge. Zeros are added at the outer border of the image only.

    window 3, padding 1, height 8 in two      rows 0..4 read 0..5, with a row of zeros before
                                              rows 4..8 read 3..8, with a row of zeros behind

Pools read the rows that their windows reach, too; the padding is -inf for a maximum and 0 for a mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import MAX_POOLS
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.convolution_windows import of_convolution, of_pool
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Places, Range, extent, full
from fxpipe.passes.sharding.sharding_rule import Called, Rule, each, every, with_arguments

CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def reached(out: Range, size: int, window: int, stride: int, before: int) -> tuple[Range, Range]:
    """The rows that the windows of an output range reach, of `size` rows with `before` rows of padding in front; and
    the number of rows of padding on each side."""
    first, after = out[0] * stride - before, (out[1] - 1) * stride - before + window
    return (max(first, 0), min(after, size)), (max(-first, 0), max(after - size, 0))


@dataclass(frozen=True)
class Slides:
    """How windows slide over an area, for each dimension.

    - `sizes`, `left`: the sizes of the input and of the output.
    - `window`, `stride`: the size of the window, dilation included, and its stride.
    - `before`: the padding in front.
    """

    sizes: tuple[int, ...]
    left: tuple[int, ...]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]

    def reach(self, area: Region) -> tuple[Region, list[int] | None]:
        """The region that the windows of an area of the result reach; and its padding in the order of `F.pad` (last
        dimension first), or None if the op's own padding is right."""
        if area == full(self.left):
            return full(self.sizes), None
        each = zip(area, self.sizes, self.window, self.stride, self.before, strict=True)
        found = [reached(*one) for one in each]
        return tuple(rows for rows, _ in found), [side for _, sides in reversed(found) for side in sides]


def padded(
    b: GraphRewriter, op: Op, image: str, pad: list[int] | None, outside: float, device: int
) -> tuple[Ref, dict[str, Any]]:
    """The image, padded with `outside` where the op cannot do it; and the op's padding argument, if it changes."""
    if pad is None:
        return Ref(image), {}
    if pad[::2] == pad[1::2]:
        return Ref(image), {"padding": tuple(reversed(pad[::2]))}
    type, rank = b.tensor(image), len(pad) // 2
    sizes = [int(size) for size in type.shape]
    sizes[-rank:] = [size + sum(pad[-2 * at - 2 : len(pad) - 2 * at]) for at, size in enumerate(sizes[-rank:])]
    made = b.glue(
        op, f"{image}_padded", device, F.pad, (Ref(image), pad, "constant", outside), replace(type, shape=tuple(sizes))
    )
    return Ref(made), {"padding": (0,) * rank}


def _convolution_slides(b: GraphRewriter, op: Op) -> Slides:
    x, weight = (b.shape(argument(op, at, CONVOLUTION_NAMES[at]).name) for at in range(2))
    return Slides(x[2:], b.shape(op.name)[2:], *of_convolution(op, weight[2:]))


def _convolution_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension, unless a window could lie entirely in its padding, and so have nothing to read."""
    slides = _convolution_slides(b, op)
    within = (before < size for before, size in zip(slides.before, slides.window, strict=True))
    return (0, 1, *(2 + dim for dim, fine in enumerate(within) if fine))


def _convolution(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    x, weight, bias = (argument(op, at, CONVOLUTION_NAMES[at]) for at in range(3))
    channels, inside, *_ = b.shape(weight.name)
    each_group = channels // argument(op, 6, "groups", 1)
    slides = _convolution_slides(b, op)

    def call(region: Region, device: int) -> Called:
        first, after = region[1]
        group, last = first // each_group, (after - 1) // each_group + 1
        area, pad = slides.reach(region[2:])
        read = b.gather(op, x.name, (region[0], (group * inside, last * inside), *area), device)
        image, padding = padded(b, op, read, pad, 0.0, device)
        rows = ((first, after), *full(b.shape(weight.name)[1:]))
        changed = {
            **padding,
            "input": image,
            "weight": b.read(op, weight, rows, device),
            "bias": bias and b.read(op, bias, rows[:1], device),
            "groups": last - group,
        }
        return op.target, *with_arguments(op, changed, CONVOLUTION_NAMES)

    wide = tuple(replace(place, region=_groups(place.region, each_group)) for place in places)
    made = each(b, op, wide, call)
    return tuple(
        replace(part, name=b.piece(op, op.name, part, place.region, place.device), region=place.region)
        for part, place in zip(made, places, strict=True)
    )


def _groups(region: Region, each_group: int) -> Region:
    """The region with whole groups of channels, if it has several."""
    sample, (first, after), *area = region
    group, last = first // each_group, (after - 1) // each_group + 1
    return region if last - group == 1 else (sample, (group * each_group, last * each_group), *area)


CONVOLUTIONS = dict.fromkeys(("conv1d", "conv2d"), Rule(_convolution, _convolution_cuts))


POOL_NAMES = ("input", "kernel_size", "stride", "padding")


def _pool_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension; not those of the area if a mean counts differently at the border; none if indices are returned."""
    if not isinstance(b.captured[op.name], TensorType):
        return ()
    before = any(_pool_slides(b, op).before)
    plain = not argument(op, 4, "ceil_mode", False) and (not before or argument(op, 5, "count_include_pad", True))
    return every(b, op) if op_name(op) in MAX_POOLS or plain else (0, 1)


def _pool_slides(b: GraphRewriter, op: Op) -> Slides:
    sizes, left = (b.shape(name)[2:] for name in (argument(op, 0, "input").name, op.name))
    return Slides(sizes, left, *of_pool(op, len(sizes)))


def _pool(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    x, slides = argument(op, 0, "input").name, _pool_slides(b, op)
    outside = -inf if op_name(op) in MAX_POOLS else 0.0

    def call(region: Region, device: int) -> Called:
        area, pad = slides.reach(region[2:])
        image, padding = padded(b, op, b.gather(op, x, (*region[:2], *area), device), pad, outside, device)
        return op.target, *with_arguments(op, {"input": image, **padding}, POOL_NAMES)

    return each(b, op, places, call)


def _adaptive_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension in which all windows are alike."""
    sizes = zip(b.shape(op.args[0].name), b.shape(op.name), strict=True)
    return (0, 1, *(dim for dim, (size, left) in enumerate(sizes) if dim > 1 and size % left == 0))


def _make_adaptive(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    x = argument(op, 0, "input")
    sizes = list(zip(b.shape(x.name)[2:], b.shape(op.name)[2:], strict=True))  # before, and after

    def call(region: Region, device: int) -> Called:
        area = [
            (0, size) if (low, high) == (0, left) else (low * (size // left), high * (size // left))
            for (low, high), (size, left) in zip(region[2:], sizes, strict=True)
        ]
        wanted = extent(region[2:])
        image = b.read(op, x, (*region[:2], *area), device)
        return op.target, (image, wanted if len(wanted) > 1 else wanted[0]), {}

    return each(b, op, places, call)


POOLS = {
    **dict.fromkeys((*sorted(MAX_POOLS), "avg_pool1d", "avg_pool2d"), Rule(_pool, _pool_cuts)),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), Rule(_make_adaptive, _adaptive_cuts)),
}
