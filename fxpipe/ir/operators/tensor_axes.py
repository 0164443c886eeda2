"""Views of an operator's output, followed from one to the next: which parts of the output's dimensions make up each
dimension of a view. So heads that are split and merged again are known to be the same tensor, and only a view that an
op really reads needs an operator.

    output            sample 8, length 5, channel 12
    view(8, 5, 3, 4)  sample, length, 3 of channel (steps of 4), 4 of channel
    transpose(1, 2)   sample, 3 of channel, length, 4 of channel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True)
class Factor:
    """`size` positions in dimension `dim` of the output, `step` apart."""

    dim: int
    size: int
    step: int = 1


Axis = tuple[Factor, ...]  # outermost first; empty for a dimension of size 1
Axes = tuple[Axis, ...]


def whole(sizes: Sequence[int]) -> Axes:
    """The axes of an output of these sizes itself."""
    return tuple(axis(dim, size) for dim, size in enumerate(sizes))


def axis(dim: int, size: int) -> Axis:
    """All of dimension `dim`, which has this size."""
    return (Factor(dim, size),) if size > 1 else ()


def sizes_of(axes: Axes) -> tuple[int, ...]:
    return tuple(prod(factor.size for factor in axis) for axis in axes)


def permuted(axes: Axes, order: Sequence[int]) -> Axes:
    return tuple(axes[dim] for dim in order)


def reshaped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes in another shape of as many elements; None if a new dimension would need a fraction of a factor.

    >>> heads = reshaped(whole((8, 12)), (8, 3, 4))
    >>> heads[1:]
    ((Factor(dim=1, size=3, step=4),), (Factor(dim=1, size=4, step=1),))
    >>> reshaped(heads, (8, 12)) == whole((8, 12))
    True
    """
    left = [factor for axis in axes for factor in axis]
    made: list[Axis] = []
    for size in shape:
        new: list[Factor] = []
        while size > 1:
            if not left:
                return None
            factor = left.pop(0)
            if factor.size > size:
                if factor.size % size:
                    return None
                rest = factor.size // size
                left.insert(0, replace(factor, size=rest))
                factor = Factor(factor.dim, size, factor.step * rest)
            if size % factor.size:
                return None
            size //= factor.size
            new.append(factor)
        made.append(_joined(new))
    return None if left else tuple(made)


def _joined(factors: Sequence[Factor]) -> Axis:
    """The factors, with neighbours that are one run of a dimension merged into one."""
    made: list[Factor] = []
    for factor in factors:
        last = made[-1] if made else None
        if last and last.dim == factor.dim and last.step == factor.step * factor.size:
            made[-1] = Factor(factor.dim, last.size * factor.size, factor.step)
        else:
            made.append(factor)
    return tuple(made)
