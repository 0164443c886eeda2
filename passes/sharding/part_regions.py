"""The regions of the parts of an op's result, given how its operator is cut.

    operator   (sample 8, channel 12), cut into channels 0..6 and 6..12
    its view   (8, 3, 4): these are no boxes, as a part would have half of the second row
    cut in 3   channels 0..4, 4..8, 8..12 are rows 0, 1, 2

A dimension that cannot be cut like the operator's stays whole. The parts along it are joined, on the device of the
first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from fxpipe.ir.operators.operators import Operator
from fxpipe.ir.operators.strategy import Config, Region, regions
from fxpipe.ir.operators.tensor_axes import Axes

Range = tuple[int, int]


@dataclass(frozen=True)
class Place:
    """A part to be made.

    - `region`: in the op's own dimensions.
    - `device`: the device that makes it.
    - `holders`: the devices of all holders of the region, of which `device` is the first; empty if there is only one.
    """

    region: Region
    device: int
    holders: tuple[int, ...] = ()


Places = tuple[Place, ...]


def full(shape: Sequence[int]) -> Region:
    """The region of a whole tensor of this shape."""
    return tuple((0, size) for size in shape)


def extent(region: Region) -> tuple[int, ...]:
    """The shape of a region."""
    return tuple(after - first for first, after in region)


def inside(inner: Region, outer: Region) -> Region:
    """The region `inner`, which lies in `outer`, in coordinates relative to `outer`."""
    return tuple((a - first, b - first) for (a, b), (first, _) in zip(inner, outer, strict=True))


def index(region: Region, shape: Sequence[int]) -> tuple[slice, ...]:
    """The index that takes a region out of a tensor of this shape."""
    found = [slice(None) if r == (0, size) else slice(*r) for r, size in zip(region, shape, strict=True)]
    while found and found[-1] == slice(None):
        found.pop()
    return tuple(found)


def overlap(one: Region, other: Region) -> Region | None:
    """The intersection of two regions; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < after for first, after in common) else None


def places(
    operator: Operator, config: Config, shape: Sequence[int], allowed: set[int], box: Callable[[Region], Region | None]
) -> Places:
    """The parts of a tensor of this shape. Only its `allowed` dimensions may be cut. `box` maps a region of the
    operator to a region of the tensor, or None. As many of the operator's dimensions as possible stay cut."""
    for kept in _subsets([dim for dim, degree in enumerate(config.degrees) if degree > 1]):
        found: dict[Region, tuple[int, ...]] = {}
        for region, held in zip(regions(operator, config)[:: config.holders], _held(config), strict=True):
            joined = tuple(r if d in kept else (0, operator.sizes[d]) for d, r in enumerate(region))
            here = box(joined)
            if here is None or not _may(here, shape, allowed):
                break
            found.setdefault(here, held)
        if sum(prod(extent(region)) for region in found) == prod(shape):
            return tuple(_place(region, held) for region, held in found.items())
    return (_place(full(shape), _held(config)[0]),)


def _held(config: Config) -> list[tuple[int, ...]]:
    """The devices of each region's holders."""
    return [config.devices[at : at + config.holders] for at in range(0, config.parts, config.holders)]


def _place(region: Region, held: tuple[int, ...]) -> Place:
    return Place(region, held[0], held if len(held) > 1 else ())


def _subsets(dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All subsets, the larger ones first, and of equal size those with the first dimensions."""
    for count in range(len(dims), -1, -1):
        yield from combinations(dims, count)


def _may(region: Region, shape: Sequence[int], allowed: set[int]) -> bool:
    return all(dim in allowed or r == (0, shape[dim]) for dim, r in enumerate(region))


def box(region: Region, axes: Axes) -> Region | None:
    """The region of a view that corresponds to a region of the operator's output; None if it is no box there.

    >>> from fxpipe.ir.operators.tensor_axes import reshaped, whole
    >>> rows = reshaped(whole((8, 12)), (8, 3, 4))
    >>> box(((0, 8), (4, 12)), rows)
    ((0, 8), (1, 3), (0, 4))
    >>> box(((0, 8), (6, 12)), rows)
    """
    digits: dict[tuple[int, int], Range] = {}
    for dim, (first, after) in enumerate(region):
        steps = sorted(((f.step, f.size) for axis in axes for f in axis if f.dim == dim), reverse=True)
        for at, (step, size) in enumerate(steps):
            if (first, after) == (0, step * size):
                digits.update({(dim, step): (0, size) for step, size in steps[at:]})
                break
            if first % step == 0 and after % step == 0:
                digits[dim, step] = (first // step, after // step)
                digits.update({(dim, inner): (0, size) for inner, size in steps[at + 1 :]})
                break
            if first // step != (after - 1) // step:
                return None
            digit = first // step
            digits[dim, step] = (digit, digit + 1)
            first, after = first - step * digit, after - step * digit
    ranges = [_joined([(digits[f.dim, f.step], f.size) for f in axis]) for axis in axes]
    return None if None in ranges else tuple(r for r in ranges if r is not None)


def _joined(digits: Sequence[tuple[Range, int]]) -> Range | None:
    """The range of a dimension whose digits, outermost first, have these ranges and sizes; None if it has gaps."""
    first, after = 0, 1
    for (low, high), size in digits:
        if after - first > 1 and (low, high) != (0, size):
            return None
        first, after = first * size + low, (after - 1) * size + high
    return first, after
