"""Pieces of a tensor: `x[:, 2:6]`, `x.narrow(1, 2, 4)`, `x.chunk(2, 1)[0]`. A part of a piece is a region of what it
is a piece of; an op follows only where dimensions go or come, or steps are skipped.

Tensors put together: a part reads those regions that lie in it, which may all be of one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fxpipe.ir.graph.graph import Op, Ref, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import CONCATENATIONS, PIECES
from fxpipe.ir.graph.value_types import TensorType, TupleType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, extent, overlap
from fxpipe.passes.sharding.sharding_rule import WHOLE, Rule

Index = tuple[int | slice | None, ...]  # as in x[...], with one entry for each dimension of x, None for a new one


def index_of(b: GraphRewriter, op: Op) -> tuple[str, Index] | None:
    """The tensor that an op takes a piece of, and which; None if that is not made of numbers that are known."""
    x = argument(op, 0, "input").name
    if x in b.rest and op_name(b.rest[x][0]) in PIECES:
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
    """One of the pieces that a tensor was taken apart into."""
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
    x, index = found
    names = b.part_names(op, places)
    return tuple(_index_part(b, op, x, index, name, place) for name, place in zip(names, places, strict=True))


def _index_part(b: GraphRewriter, op: Op, x: str, index: Index, name: str, place: Place) -> Part:
    read, rest = region_of(index, place.region, b.shape(x))
    made = b.gather(op, x, read, place.device)
    if any(one != slice(None) for one in rest):
        type = b.typed(op.name, extent(place.region))
        made = b.add(op, name, place.device, operator.getitem, (Ref(made), rest), type=type)
    return Part(made, place.region, b.devices.get(made))


def region_of(index: Index, region: Region, shape: Sequence[int]) -> tuple[Region, Index]:
    """The region of the source that a region of the piece is, and how that is still to be indexed.

    >>> region_of((3, slice(1, None, 2), None), ((0, 2), (0, 1)), (5, 8))
    (((3, 4), (1, 4)), (0, slice(None, None, 2), None))
    """
    ranges, read, rest = list(region), [], list[int | slice | None]()
    sizes = list(shape)
    for one in (*index, *[slice(None)] * (len(shape) - sum(one is not None for one in index))):
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
    """Any dimension of tensors that have as many, and are there one by one."""
    rank = len(b.shape(op.name))
    tensors = argument(op, 0, "tensors")
    fit = isinstance(tensors, (tuple, list)) and all(b.is_tensor(t) and len(b.shape(t.name)) == rank for t in tensors)
    return range(rank) if fit else ()


def _join(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    if not _join_cuts(b, op):
        return WHOLE.make(b, op, places)
    names = b.part_names(op, places)
    return tuple(_join_part(b, op, name, place) for name, place in zip(names, places, strict=True))


def _join_part(b: GraphRewriter, op: Op, name: str, place: Place) -> Part:
    dim = argument(op, 1, "dim", 0) % len(place.region)
    pieces, before = [], 0
    for tensor in argument(op, 0, "tensors"):
        after = before + b.shape(tensor.name)[dim]
        lies = (*place.region[:dim], (before, after), *place.region[dim + 1 :])
        if (common := overlap(lies, place.region)) is not None:
            first, last = common[dim]
            read = (*common[:dim], (first - before, last - before), *common[dim + 1 :])
            pieces.append(b.gather(op, tensor.name, read, place.device))
        before = after
    if len(pieces) > 1:
        args = ([Ref(piece) for piece in pieces], dim)
        made = b.add(op, name, place.device, torch.cat, args, type=b.typed(op.name, extent(place.region)))
    else:
        (made,) = pieces
    type = b.types[made]
    assert isinstance(type, TensorType)
    return Part(made, place.region, b.devices.get(made))


JOINS = dict.fromkeys(CONCATENATIONS, Rule(_join, _join_cuts))
INDEXING = dict.fromkeys(("getitem", "narrow", "select"), Rule(_index, _index_cuts, plain=False))
