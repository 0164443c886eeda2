"""Convolutions: a part has its own output channels, so its own rows of the weights, and reads as many more rows of the
image as its windows reach over its edge. Zeros are put around the image at its outer border only.

    window 3, padding 1, height 8 in two      rows 0..4 read 0..5, with a row of zeros before
                                              rows 4..8 read 3..8, with a row of zeros behind
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from fxpipe.ir.graph import Op, Ref
from fxpipe.ir.strategy import Region

from ..building import Building, Part
from ..regions import Places, Range, extent
from ..rule import Rule, argument, each, with_arguments

NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def numbers(given: Any, rank: int) -> tuple[int, ...]:
    """One number for each dimension that is slid over."""
    several = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return several if len(several) == rank else several * rank


def reached(out: Range, size: int, window: int, stride: int, before: int) -> tuple[Range, Range]:
    """What windows for a range of the output reach of `size` rows that have `before` rows of padding before them: the
    rows, and how many of padding on either side."""
    first, after = out[0] * stride - before, (out[1] - 1) * stride - before + window
    return (max(first, 0), min(after, size)), (max(-first, 0), max(after - size, 0))


def slide(
    area: Region, sizes: Sequence[int], window: Sequence[int], stride: Sequence[int], before: Sequence[int]
) -> tuple[Region, list[int]]:
    """`reached` in every dimension; the padding as `F.pad` takes it, from the last dimension on."""
    found = [reached(*each) for each in zip(area, sizes, window, stride, before, strict=True)]
    return tuple(rows for rows, _ in found), [side for _, sides in reversed(found) for side in sides]


def _cuts(b: Building, op: Op) -> Iterable[int]:
    """Any dimension; but a window that lies in the padding altogether has nothing to read."""
    rank = len(b.shape(op.name)) - 2
    window, _, before = _slides(b, op)
    far = [pad >= size for pad, size in zip(before, window, strict=True)]
    return (0, 1, *(2 + dim for dim in range(rank) if not far[dim]))


def _slides(b: Building, op: Op) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Window, stride and the padding before, in each dimension."""
    _, _, *sizes = b.shape(argument(op, 1, "weight").name)
    rank = len(sizes)
    dilation = numbers(argument(op, 5, "dilation", 1), rank)
    window = tuple((size - 1) * d + 1 for size, d in zip(sizes, dilation, strict=True))
    padding = argument(op, 4, "padding", 0)
    same = {"same": tuple((size - 1) // 2 for size in window), "valid": (0,) * rank}
    before = same[padding] if isinstance(padding, str) else numbers(padding, rank)
    return window, numbers(argument(op, 3, "stride", 1), rank), before


def _make(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    x, weight, bias = (argument(op, at, NAMES[at]) for at in range(3))
    channels, inside, *_ = b.shape(weight.name)
    groups = argument(op, 6, "groups", 1)
    each_group = channels // groups
    shape = b.shape(x.name)
    slides = _slides(b, op)

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        first, after = region[1]
        group, last = first // each_group, (after - 1) // each_group + 1
        area, pad = slide(region[2:], shape[2:], *slides)
        read: Region = (region[0], (group * inside, last * inside), *area)
        image = b.gather(op, x.name, read, device)
        if any(pad) and pad[::2] != pad[1::2]:
            padded = [size + pad[-2 * at - 2] + pad[-2 * at - 1] for at, size in enumerate(extent(area))]
            type = b.typed(image, (*extent(read)[:2], *padded))
            image, pad = b.glue(op, f"{image}_padded", device, F.pad, (Ref(image), pad), type), [0] * len(pad)
        rows = ((first, after), *((0, size) for size in b.shape(weight.name)[1:]))
        changed = {
            "input": Ref(image),
            "weight": Ref(b.gather(op, weight.name, rows, device)),
            "bias": bias and Ref(b.gather(op, bias.name, (rows[0],), device)),
            "padding": tuple(reversed(pad[::2])),
            "groups": last - group,
        }
        return op.target, *with_arguments(op, changed, NAMES)

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


CONVOLUTIONS = dict.fromkeys(("conv1d", "conv2d"), Rule(_make, _cuts))
