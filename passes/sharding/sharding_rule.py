"""How the parts of an op are made, for each op that can be cut: one file of rules for each family (`rules/`).

A rule says which dimensions of the op's result may be cut so that the parts are exactly those of the whole result, and
makes the parts. Dimensions that it does not allow stay whole, whatever the strategy says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.op_arguments import by_name
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, Range, extent, full

Make = Callable[[GraphRewriter, Op, Places], tuple[Part, ...]]
Cuts = Callable[[GraphRewriter, Op], Iterable[int]]
Called = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a target, and its arguments
Partial = Callable[[GraphRewriter, Op, Place, Range], Called]


@dataclass(frozen=True)
class Rule:
    """`cuts` finds the dimensions that may be cut, and `make` makes the parts. Both refer to the op's result; for an op
    that reduces its first argument to a number, to that argument. For a product, `partial` says how the part at a place
    is called that adds up a range of the summed dimension."""

    make: Make
    cuts: Cuts
    plain: bool = True  # where nothing is cut, the op may be called as it is
    partial: Partial | None = None


def every(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension may be cut."""
    return range(len(b.shape(op.name)))


def by_place(b: GraphRewriter, op: Op, places: Places, make: Callable[[str, Place], Part]) -> tuple[Part, ...]:
    """A part for each place: `make(name, place)`."""
    return tuple(make(name, place) for name, place in zip(b.part_names(op, places), places, strict=True))


def each(b: GraphRewriter, op: Op, places: Places, call: Callable[[Region, int], Called]) -> tuple[Part, ...]:
    """A part for each place: `call(region, device)` gives the target to call and its arguments."""

    def make(name: str, place: Place) -> Part:
        target, args, kwargs = call(place.region, place.device)
        type = b.typed(op.name, extent(place.region))
        b.add(op, name, place.device, target, args, kwargs, type=type, random=op.random)
        return Part(name, place.region, place.device)

    return by_place(b, op, places, make)


def reading(
    b: GraphRewriter,
    op: Op,
    places: Places,
    names: Sequence[str],
    regions: Callable[[Region], Mapping[str, Region | None]],
) -> tuple[Part, ...]:
    """A part for each place, which calls the op's target. `regions(region)` gives the regions of the op's tensors that
    the part reads, by argument name; None for a whole tensor. `names`: the names of the positional arguments."""
    given = by_name(op, names)

    def call(region: Region, device: int) -> Called:
        wanted = regions(region).items()
        read = {name: b.read(op, given[name], of, device) for name, of in wanted if given.get(name) is not None}
        return op.target, *with_arguments(op, read, names)

    return each(b, op, places, call)


def with_arguments(op: Op, changed: dict[str, Any], names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments, with those in `changed` replaced, by name. `names`: the names of the positional arguments."""
    args = tuple(changed.get(names[at], arg) if at < len(names) else arg for at, arg in enumerate(op.args))
    given = set(names[: len(op.args)])
    kwargs = {**op.kwargs, **{name: value for name, value in changed.items() if name not in given}}
    return args, kwargs


def aligned(region: Region, shape: Sequence[int]) -> Region:
    """The region of an operand of this shape that broadcasts to the region of the result."""
    skipped = len(region) - len(shape)
    return tuple((0, 1) if size == 1 else region[skipped + at] for at, size in enumerate(shape))


def whole(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    """The op as it is, once, on the whole of its arguments. If it writes in place, it writes to a copy, unless it
    writes a state."""
    (place,) = places
    (name,) = b.part_names(op, places)
    args, kwargs = b.on(op, (op.args, dict(op.kwargs)), place.device)
    writes = op.writes
    if any(written not in b.states for written in writes):
        copied = args[0].name
        copy = b.glue(op, f"{copied}_copy", place.device, "clone", (Ref(copied),), b.tensor(copied))
        args, writes = (Ref(copy), *args[1:]), (copy,)
    b.add(op, name, place.device, op.target, args, kwargs, writes=writes, random=op.random)
    return (Part(name, place.region, place.device, items(b, op, name, place.device)),)


def items(b: GraphRewriter, op: Op, name: str, device: int, region: Region | None = None) -> tuple[Part | None, ...]:
    """The parts for the items of the new tuple `name`, each of this `region`, or whole if that is None; None for an
    item that is no tensor."""
    found: list[Part | None] = []
    for at, type in enumerate(getattr(b.types[name], "items", ())):
        if isinstance(type, TensorType):
            item = b.add(op, b.free(f"{name}_{at}"), device, operator.getitem, (Ref(name), at), type=type)
            found.append(Part(item, region or full(tuple(map(int, type.shape))), device))
        else:
            found.append(None)
    return tuple(found)


WHOLE = Rule(whole, lambda b, op: ())
