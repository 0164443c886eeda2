"""Other shapes of the same numbers, and other orders of dimensions.

A reshape joins and splits dimensions in groups, and within a group numbers keep their order. So a part of the result is
a run of numbers if its outer dimensions are single, one is a range, and the inner ones are whole; and the same run is a
box of the source if it begins and ends with whole rows. Where it is not, a larger box is read and cut afterwards.

    (8, 6, 4) to (8, 24)      columns 4..12 are rows 1..3                 read [:, 1:3], reshape
                              columns 6..12 lie in rows 1..3              read [:, 1:3], reshape, cut [:, 2:8]
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.graph.ops import PERMUTATIONS, RESHAPES
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Places, Range, extent, full, index, inside
from fxpipe.passes.sharding.sharding_rule import Rule, aligned, each, every

KEPT = ("flatten", "squeeze", "unsqueeze")  # they name no sizes, so parts are viewed as the whole is
Group = tuple[slice, slice]  # dimensions of the source, and those of the result that they become


def groups(source: Sequence[int], shape: Sequence[int]) -> Iterator[Group]:
    """The smallest runs of dimensions that have as many numbers on both sides.

    >>> list(groups((8, 6, 4), (2, 4, 24)))
    [(slice(0, 1, None), slice(0, 2, None)), (slice(1, 3, None), slice(2, 3, None))]
    """
    i = j = 0
    while i < len(source) or j < len(shape):
        first, start = i, j
        left = right = 1
        while i == first or j == start or left != right:
            if (left <= right and i < len(source)) or j == len(shape):
                left *= source[i]
                i += 1
            else:
                right *= shape[j]
                j += 1
            if (i == len(source) or j == len(shape)) and left == right:
                break
        yield slice(first, i), slice(start, j)


def run(region: Region, shape: Sequence[int]) -> Range:
    """The shortest run of numbers, in their order, that has a region of a tensor of this shape in it."""
    first = last = 0
    for (low, high), size in zip(region, shape, strict=True):
        first, last = first * size + low, last * size + high - 1
    return first, last + 1


def around(numbers: Range, shape: Sequence[int]) -> Region:
    """The smallest box of this shape that is one run and has these numbers in it: one number of each outer dimension, a
    range of one, all of the inner ones."""
    first, after = numbers
    found: list[Range] = []
    for dim in range(len(shape)):
        step = prod(shape[dim + 1 :])
        low, high = first // step, -(-after // step)
        if high - low > 1 or (first, after) == (low * step, high * step):
            return (*found, (low, high), *full(shape[dim + 1 :]))
        found.append((low, low + 1))
        first, after = first - low * step, after - low * step
    return tuple(found)


def _reshape(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    x = op.args[0].name
    source, shape = b.shape(x), b.shape(op.name)
    pairs = list(groups(source, shape))

    def part(name: str, region: Region, device: int) -> Part:
        wanted = [around(run(region[there], shape[there]), shape[there]) for _, there in pairs]
        runs = [run(box, shape[there]) for box, (_, there) in zip(wanted, pairs, strict=True)]
        boxes = [around(numbers, source[here]) for numbers, (here, _) in zip(runs, pairs, strict=True)]
        read = [run(box, source[here]) for box, (here, _) in zip(boxes, pairs, strict=True)]
        result = tuple(r for box in wanted for r in box)
        made = Step(b, op, device, b.gather(op, x, tuple(r for box in boxes for r in box), device))
        if read != runs:
            made.shaped(tuple(after - first for first, after in read))
            made.cut(inside(tuple(runs), tuple(read)))
        made.shaped(extent(result), op if read == runs and op_name(op) in KEPT else None)
        made.cut(inside(region, result))
        return Part(made.named(name), region, b.devices.get(made.value))

    names = b.part_names(op, places)
    return tuple(part(name, *each) for name, each in zip(names, ((p.region, p.device) for p in places), strict=True))


class Step:
    """A value on its way through views, each of which is an op if it changes anything."""

    def __init__(self, b: GraphRewriter, op: Op, device: int, value: str) -> None:
        self.b, self.op, self.device, self.value = b, op, device, value
        type = b.types[value]
        assert isinstance(type, TensorType)
        self.shape = tuple(map(int, type.shape))
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = []

    def shaped(self, shape: tuple[int, ...], own: Op | None = None) -> None:
        if shape != self.shape:
            call = ("reshape", (shape,), {}) if own is None else (own.target, own.args[1:], dict(own.kwargs))
            self.calls.append((*call, shape))
            self.shape = shape

    def cut(self, region: Region) -> None:
        if extent(region) != self.shape:
            self.calls.append((operator.getitem, (index(region, self.shape),), {}, extent(region)))
            self.shape = extent(region)

    def named(self, name: str) -> str:
        """The value after all of it, which is called so if it is a new one."""
        for at, (target, args, kwargs, shape) in enumerate(self.calls, start=1):
            own = name if at == len(self.calls) else self.b.free(f"{name}_{op_name(self.op)}")
            type = self.b.typed(self.op.name, shape)
            args, kwargs = self.b.literal((args, kwargs))
            self.value = self.b.add(self.op, own, self.device, target, (Ref(self.value), *args), kwargs, type=type)
        return self.value


def _order(b: GraphRewriter, op: Op) -> list[int]:
    """For each dimension of the result, that of the source."""
    dims = [*op.args[1:], *(value for key, value in op.kwargs.items() if key != "input")]
    order = list(range(len(b.shape(op.name))))
    if op_name(op) == "permute":
        return [int(dim) % len(order) for dim in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    if len(order) > 1:
        one, other = (int(dim) % len(order) for dim in dims or (0, 1))
        order[one], order[other] = order[other], order[one]
    return order


def _permute(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    order = _order(b, op)

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        read = tuple(region[order.index(dim)] for dim in range(len(order)))
        return op.target, (Ref(b.gather(op, op.args[0].name, read, device)), *op.args[1:]), dict(op.kwargs)

    return each(b, op, places, call)


def _expand(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    x = op.args[0].name

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return "expand", (Ref(b.gather(op, x, aligned(region, b.shape(x)), device)), extent(region)), {}

    return each(b, op, places, call)


SHAPES = {
    **dict.fromkeys(RESHAPES, Rule(_reshape, every, plain=False)),
    **dict.fromkeys(PERMUTATIONS, Rule(_permute, every)),
    **dict.fromkeys(("expand", "expand_as"), Rule(_expand, every)),
}
