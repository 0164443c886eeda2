"""How the parts of an op are made, for each op that can be cut: one file of rules for each family (`rules/`).

A rule says which dimensions of the op's result may be cut so that the parts are exactly what the whole would be, and
makes the parts. Whatever else a strategy asks for stays whole, so a rule is never asked for what it cannot do.
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
from fxpipe.passes.sharding.part_regions import Place, Places, extent, full

Make = Callable[[GraphRewriter, Op, Places], tuple[Part, ...]]
Cuts = Callable[[GraphRewriter, Op], Iterable[int]]


@dataclass(frozen=True)
class Rule:
    """`cuts` finds the dimensions that may be cut, `make` makes the parts: of the op's result, or of its first argument
    where the result is a number over all of that."""

    make: Make
    cuts: Cuts
    plain: bool = True  # where nothing is cut, the op may be called as it is


def every(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension may be cut."""
    return range(len(b.shape(op.name)))


Called = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a target, and its arguments


def by_place(b: GraphRewriter, op: Op, places: Places, make: Callable[[str, Place], Part]) -> tuple[Part, ...]:
    """A part for each place: `make(name, place)`."""
    return tuple(make(name, place) for name, place in zip(b.part_names(op, places), places, strict=True))


def each(b: GraphRewriter, op: Op, places: Places, call: Callable[[Region, int], Called]) -> tuple[Part, ...]:
    """A part for each place: `call(region, device)` is what it calls, with which arguments."""

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
    """A part for each place, which calls what the op calls: `regions(region)` says which regions of the op's tensors it
    reads, by the names of the arguments; None for all of one. `names` are the arguments by position."""
    given = by_name(op, names)

    def call(region: Region, device: int) -> Called:
        wanted = regions(region).items()
        read = {name: b.read(op, given[name], of, device) for name, of in wanted if given.get(name) is not None}
        return op.target, *with_arguments(op, read, names)

    return each(b, op, places, call)


def with_arguments(op: Op, changed: dict[str, Any], names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments with some of them changed, by name, wherever they stand; `names` are those by position."""
    args = tuple(changed.get(names[at], arg) if at < len(names) else arg for at, arg in enumerate(op.args))
    given = set(names[: len(op.args)])
    kwargs = {**op.kwargs, **{name: value for name, value in changed.items() if name not in given}}
    return args, kwargs


def aligned(region: Region, shape: Sequence[int]) -> Region:
    """The region of an operand of this shape that broadcasts to the region of the result."""
    skipped = len(region) - len(shape)
    return tuple((0, 1) if size == 1 else region[skipped + at] for at, size in enumerate(shape))


def whole(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    """The op as it is, once, on all of what it reads; what it writes in place is a copy that nobody else has."""
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
    """The items of a tuple that has been made, all of this region or each of them whole; None for no tensor."""
    found: list[Part | None] = []
    for at, type in enumerate(getattr(b.types[name], "items", ())):
        if isinstance(type, TensorType):
            item = b.add(op, b.free(f"{name}_{at}"), device, operator.getitem, (Ref(name), at), type=type)
            found.append(Part(item, region or full(tuple(map(int, type.shape))), device))
        else:
            found.append(None)
    return tuple(found)


WHOLE = Rule(whole, lambda b, op: ())
