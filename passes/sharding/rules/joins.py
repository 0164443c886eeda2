"""Tensors put together: a part reads those regions that lie in it, which may all be of one of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxpipe.ir.arguments import argument
from fxpipe.ir.graph import Op, Ref
from fxpipe.ir.types import TensorType
from fxpipe.passes.sharding.building import Building, Part
from fxpipe.passes.sharding.regions import Place, Places, extent, overlap
from fxpipe.passes.sharding.rule import WHOLE, Rule


def _cuts(b: Building, op: Op) -> Iterable[int]:
    """Any dimension of tensors that have as many, and are there one by one."""
    rank = len(b.shape(op.name))
    tensors = argument(op, 0, "tensors")
    fit = isinstance(tensors, (tuple, list)) and all(b.is_tensor(t) and len(b.shape(t.name)) == rank for t in tensors)
    return range(rank) if fit else ()


def _make(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    if not _cuts(b, op):
        return WHOLE.make(b, op, places)
    names = b.part_names(op, places)
    return tuple(_part(b, op, name, place) for name, place in zip(names, places, strict=True))


def _part(b: Building, op: Op, name: str, place: Place) -> Part:
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


JOINS = dict.fromkeys(("cat", "concat", "concatenate"), Rule(_make, _cuts))
