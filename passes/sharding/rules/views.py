"""Other shapes of the same numbers, and other orders of dimensions.

A reshape joins and splits dimensions in groups, and within a group numbers keep their order. A part of the result is a
run of consecutive numbers if its outer dimensions have one index, the next is a range, and the inner ones are whole.
The run is a box of the source if it begins and ends with whole rows; else a larger box is read and cut afterwards.

    (8, 6, 4) to (8, 24)      columns 4..12 are rows 1..3                 read [:, 1:3], reshape
                              columns 6..12 lie in rows 1..3              read [:, 1:3], reshape, cut [:, 2:8]

Pieces of a tensor: `x[:, 2:6]`, `x.narrow(1, 2, 4)`, `x.chunk(2, 1)[0]`. A part of a piece is a region of the tensor,
so it needs an op only if dimensions are removed or added, or the step is not 1. Concatenation: a part reads the regions
of the tensors that lie in it, possibly of one tensor only.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from fxpipe.ir.graph.graph import Op, Ref, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import CONCATENATIONS, PERMUTATIONS, RESHAPES, SPLIT_OPS
from fxpipe.ir.graph.value_types import TensorType, TupleType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, Range, extent, full, index, inside, overlap
from fxpipe.passes.sharding.sharding_rule import WHOLE, Called, Rule, aligned, by_place, each, every, reading

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
    """The shortest run of consecutive numbers that contains a region of a tensor of this shape."""
    first = last = 0
    for (low, high), size in zip(region, shape, strict=True):
        first, last = first * size + low, last * size + high - 1
    return first, last + 1


def around(numbers: Range, shape: Sequence[int]) -> Region:
    """The smallest box in a tensor of this shape that is one run and contains these numbers: one index of each outer
    dimension, a range of the next, all of the inner ones."""
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

    def part(name: str, place: Place) -> Part:
        region, device = place.region, place.device
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

    return by_place(b, op, places, part)


class Step:
    """A value on its way through views, each of which is an op if it changes anything."""

    def __init__(self, b: GraphRewriter, op: Op, device: int, value: str) -> None:
        self.b, self.op, self.device, self.value = b, op, device, value
        self.shape = tuple(map(int, b.tensor(value).shape))
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
        """Add the ops of all views, and return the name of the result: `name` if there is any op."""
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

    source = [order.index(dim) for dim in range(len(order))]
    return reading(b, op, places, ("input",), lambda region: {"input": tuple(region[at] for at in source)})


def _expand(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    x = op.args[0]

    def call(region: Region, device: int) -> Called:
        return "expand", (b.read(op, x, aligned(region, b.shape(x.name)), device), extent(region)), {}

    return each(b, op, places, call)


SHAPES = {
    **dict.fromkeys(RESHAPES, Rule(_reshape, every, plain=False)),
    **dict.fromkeys(PERMUTATIONS, Rule(_permute, every)),
    **dict.fromkeys(("expand", "expand_as"), Rule(_expand, every)),
}

# Pieces, and tensors put together -------------------------------------------------------------------------------------

Index = tuple[int | slice | None, ...]  # as in x[...], with one entry for each dimension of x, None for a new one


def index_of(b: GraphRewriter, op: Op) -> tuple[str, Index] | None:
    """The tensor that an op takes a piece of, and the index of the piece; None if it has other than known numbers."""
    x = argument(op, 0, "input").name
    if x in b.rest and op_name(b.rest[x][0]) in SPLIT_OPS:
        return _item(b, b.rest[x][0], op.args[1])
    if not isinstance(b.captured[x], TensorType):
        return None
    shape = b.shape(x)
    if op_name(op) == "getitem":
        given = b.literal(op.args[1])
        return None if any(True for _ in refs(given)) else _spread(x, given, len(shape))
    dim = int(argument(op, 1, "dim")) % len(shape)
    if op_name(op) == "select":
        return _along(x, dim, b.literal(argument(op, 2, "index")))
    start, length = b.literal((argument(op, 2, "start"), argument(op, 3, "length")))
    return _along(x, dim, slice(start % shape[dim], start % shape[dim] + length)) if isinstance(start, int) else None


def _along(x: str, dim: int, one: int | slice) -> tuple[str, Index]:
    return x, (*[slice(None)] * dim, one)


def _item(b: GraphRewriter, op: Op, at: int) -> tuple[str, Index]:
    """The tensor that `op` takes apart, and the index of its piece number `at`."""
    x, type = argument(op, 0, "input").name, b.captured[op.name]
    assert isinstance(type, TupleType)
    shape = b.shape(x)
    sizes = [item.shape for item in type.items if isinstance(item, TensorType)]
    dim = int(argument(op, 1 if op_name(op) == "unbind" else 2, "dim", 0)) % len(shape)
    at %= len(sizes)
    if op_name(op) == "unbind":
        return _along(x, dim, at)
    before = sum(int(size[dim]) for size in sizes[:at])
    return _along(x, dim, slice(before, before + int(sizes[at][dim])))


def _spread(x: str, given: Any, rank: int) -> tuple[str, Index] | None:
    """The index with an entry for each dimension; None if it is made of more than numbers and slices."""
    entries = given if isinstance(given, tuple) else (given,)
    if any(
        isinstance(one, bool) or not (one is None or one is ... or isinstance(one, (int, slice))) for one in entries
    ):
        return None
    at = next((at for at, one in enumerate(entries) if one is ...), len(entries))
    left = rank - sum(one is not None and one is not ... for one in entries)
    return x, (*entries[:at], *[slice(None)] * left, *entries[at + 1 :])


def _index_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    return range(len(b.shape(op.name))) if index_of(b, op) else ()


def _index(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    found = index_of(b, op)
    made = b.parts.get(argument(op, 0, "input").name, ())
    if found is None and any(part.items for part in made):
        return tuple(item for part in made if (item := part.items[op.args[1]]) is not None)
    if found is None:
        return WHOLE.make(b, op, places)
    x, entries = found
    return by_place(b, op, places, partial(_index_part, b, op, x, entries))


def _index_part(b: GraphRewriter, op: Op, x: str, entries: Index, name: str, place: Place) -> Part:
    read, rest = region_of(entries, place.region, b.shape(x))
    made = b.gather(op, x, read, place.device)
    if any(one != slice(None) for one in rest):
        type = b.typed(op.name, extent(place.region))
        made = b.add(op, name, place.device, operator.getitem, (Ref(made), rest), type=type)
    return Part(made, place.region, b.devices.get(made))


def region_of(entries: Index, region: Region, shape: Sequence[int]) -> tuple[Region, Index]:
    """The region of the source to read for a region of the piece, and the index that remains to be applied to it.

    >>> region_of((3, slice(1, None, 2), None), ((0, 2), (0, 1)), (5, 8))
    (((3, 4), (1, 4)), (0, slice(None, None, 2), None))
    """
    ranges, read, rest = list(region), [], list[int | slice | None]()
    sizes = list(shape)
    for one in (*entries, *[slice(None)] * (len(shape) - sum(one is not None for one in entries))):
        if one is None:
            ranges.pop(0)
            rest.append(None)
            continue
        size = sizes.pop(0)
        if isinstance(one, slice):
            first, _, step = one.indices(size)
            low, high = ranges.pop(0)
            read.append((first + low * step, first + (high - 1) * step + 1))
            rest.append(slice(None, None, step if step != 1 else None))
        else:
            read.append((one % size, one % size + 1))
            rest.append(0)
    while rest and rest[-1] == slice(None):
        rest.pop()
    return tuple(read), tuple(rest)


def _join_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension, if the op gets a list of tensors that all have the result's number of dimensions."""
    rank = len(b.shape(op.name))
    tensors = argument(op, 0, "tensors")
    fit = isinstance(tensors, (tuple, list)) and all(b.is_tensor(t) and len(b.shape(t.name)) == rank for t in tensors)
    return range(rank) if fit else ()


def _join(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    if not _join_cuts(b, op):
        return WHOLE.make(b, op, places)
    return by_place(b, op, places, partial(_join_part, b, op))


def _join_part(b: GraphRewriter, op: Op, name: str, place: Place) -> Part:
    dim = argument(op, 1, "dim", 0) % len(place.region)
    pieces, before = [], 0
    for tensor in argument(op, 0, "tensors"):
        after = before + b.shape(tensor.name)[dim]
        lies = (*place.region[:dim], (before, after), *place.region[dim + 1 :])
        if (common := overlap(lies, place.region)) is not None:
            first, last = common[dim]
            read = (*common[:dim], (first - before, last - before), *common[dim + 1 :])
            pieces.append(b.read(op, tensor, read, place.device))
        before = after
    made = pieces[0].name
    if len(pieces) > 1:
        type = b.typed(op.name, extent(place.region))
        made = b.add(op, name, place.device, torch.cat, (pieces, dim), type=type)
    return Part(made, place.region, b.devices.get(made))


JOINS = dict.fromkeys(CONCATENATIONS, Rule(_join, _join_cuts))
INDEXING = dict.fromkeys(("getitem", "narrow", "select"), Rule(_index, _index_cuts, plain=False))
