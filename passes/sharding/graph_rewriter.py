"""Builds the sharded graph: each value of the captured graph is known by its parts, and an op that needs a region of it
gathers the region from the parts.

    x = [x_0: rows 0..4 on device 0, x_1: rows 4..8 on device 1]

    gather rows 0..4                  x_0, no op
    gather rows 1..3, on device 1     x_0_cut = x_0[1:3], on device 0, where x_0 is: so only these rows move
    gather all, on device 1           x = cat([x_0, x_1]), on device 1

A region is gathered once for each device. Inputs and states are present on all devices. Values that are computed from
these alone never move: each device that needs a region of one computes that region itself (`rest`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import torch

from fxpipe.ir.graph.graph import Graph, Op, Ref, map_refs
from fxpipe.ir.graph.graph import Region as Context
from fxpipe.ir.graph.value_types import ObjectType, ScalarType, TensorType, TupleType, ValueType, dim_size
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.part_regions import Place, extent, full, index, inside, overlap


@dataclass(frozen=True)
class Part:
    """A value of the new graph that is a region of a captured value.

    - `name`: its name in the new graph; `region`: the region.
    - `device`: its device; None if it is present on all devices.
    - `items`: for a part of a tuple, the parts of its items, None for an item that is no tensor.
    """

    name: str
    region: Region
    device: int | None
    items: tuple[Part | None, ...] = ()


class GraphRewriter:
    """The ops of the new graph so far, and what is known of their values.

    - `ops`, `devices`, `types`: the new ops; by name, their devices and the types of all new values.
    - `symbolic`, `captured`: the types of captured values, with symbolic sizes and with numbers.
    - `numbers`: the values of captured numbers that are known from the sizes.
    - `parts`: the parts of each captured value.
    - `rest`: for each captured value that depends on inputs and states alone, its op and how a region of it is made.
    - `made`: the regions gathered so far, by name, region and device.
    - `samples`: the captured values that depend on the samples.
    - `beside`: whether a device that has a copy of a value is the one from which another device reads it.
    - `kept`: the outputs, whose names are reserved for the returned values.
    """

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.ops: list[Op] = []
        self.devices: dict[str, int] = {}
        self.made_for: dict[str, str] = {}
        self.symbolic = graph.types
        self.captured: dict[str, ValueType] = {n: concrete(t, sizes) for n, t in self.symbolic.items()}
        self.types: dict[str, ValueType] = {item.name: self.captured[item.name] for item in graph.inputs}
        self.types |= {state.name: self.captured[state.name] for state in graph.states}
        self.numbers: dict[str, Any] = dict(sizes)
        self.parts: dict[str, tuple[Part, ...]] = {
            name: (Part(name, full(self.shape(name)), None),)
            for name, type in self.types.items()
            if isinstance(type, TensorType)
        }
        self.rest: dict[str, tuple[Op, Callable[[Place], tuple[Part, ...]]]] = {}
        self.made: dict[tuple[str, Region, int], str] = {}
        self.draws = count()
        self.numbers_of: dict[str, Iterator[int]] = {}
        self.taken = {size.name for size in graph.sizes} | set(self.types)
        self.states = {state.name for state in graph.states}
        self.samples: frozenset[str] = frozenset()
        self.reserved = {op.name for op in graph.ops}
        self.beside: Callable[[int, int], bool] = lambda holder, reader: holder == reader
        self.kept = {output.value for output in graph.outputs}

    # types -----------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a captured tensor."""
        type = self.captured[name]
        assert isinstance(type, TensorType), f"{name} is {type}"
        return tuple(map(int, type.shape))

    def is_tensor(self, arg: Any) -> bool:
        return isinstance(arg, Ref) and isinstance(self.captured[arg.name], TensorType)

    def tensor(self, name: str) -> TensorType:
        """The type of a tensor, captured or new."""
        type = self.types[name] if name in self.types else self.captured[name]
        assert isinstance(type, TensorType)
        return type

    def typed(self, like: str, shape: Sequence[int]) -> TensorType:
        """The type of the tensor `like`, with another shape."""
        return replace(self.tensor(like), shape=tuple(shape))

    # names -----------------------------------------------------------------------------------------

    def free(self, stem: str) -> str:
        """A name like `stem` that no other value has or will have."""
        names = chain((stem,), (f"{stem}_{number}" for number in self.numbers_of.setdefault(stem, count())))
        name = next(n for n in names if n not in self.taken and n not in self.reserved)
        self.taken.add(name)
        return name

    def part_names(self, op: Op, places: Sequence[Place]) -> list[str]:
        """Names for the parts of an op: `conv1_0`, `conv1_1`; for a single part the op's own, if it is free."""
        if len(places) == 1 and op.name not in self.rest and op.name not in self.taken:
            self.taken.add(op.name)
            return [op.name]
        names = [f"{op.name}_{at}" for at in range(len(places))]
        if any(name in self.taken or name in self.reserved for name in names):
            names = [f"{op.name}_part{at}" for at in range(len(places))]
        return [self.free(name) for name in names]

    # ops -------------------------------------------------------------------------------------------

    def add(
        self,
        op: Op,
        name: str,
        device: int,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        type: ValueType | None = None,
        regions: tuple[Context, ...] | None = None,
        writes: tuple[str, ...] = (),
        random: bool = False,
    ) -> str:
        """Add an op on a device, made for the captured `op`, and return its name. `type` and `regions` (its contexts)
        are those of `op` unless given."""
        made = replace(
            op,
            name=name,
            target=target,
            args=args,
            kwargs=dict(kwargs or {}),
            type=self.captured[op.name] if type is None else type,
            regions=op.regions if regions is None else regions,
            writes=writes,
            draw=next(self.draws) if random else None,
        )
        self.ops.append(made)
        self.devices[name] = device
        self.made_for[name] = op.name
        self.types[name] = made.type
        self.taken.add(name)
        return name

    def glue(self, op: Op, stem: str, device: int, target: Any, args: tuple[Any, ...], type: TensorType) -> str:
        """Add an op that only moves or combines parts, outside of all contexts, under a free name like `stem`."""
        return self.add(op, self.free(stem), device, target, args, type=type, regions=())

    def literal(self, nest: Any) -> Any:
        """The arguments, with references to known numbers replaced by the numbers."""
        return map_refs(nest, lambda ref: self.numbers.get(ref.name, ref))

    def on(self, op: Op, nest: Any, device: int) -> Any:
        """The arguments, with references to the whole of each tensor on a device, and known numbers in place."""

        def value(ref: Ref) -> Any:
            return self.numbers[ref.name] if ref.name in self.numbers else self.read(op, ref, None, device)

        return map_refs(nest, value)

    # gathering -------------------------------------------------------------------------------------

    def whole(self, op: Op, name: str, device: int) -> str:
        """The name of a whole captured value on a device."""
        type = self.captured[name]
        if isinstance(type, TensorType):
            return self.gather(op, name, full(self.shape(name)), device)
        if name in self.rest and (name, (), device) not in self.made:
            self._make(name, (), device)
        if (name, (), device) in self.made:
            return self.made[name, (), device]
        return self.parts[name][0].name if name in self.parts else name  # an input that is a number or an object

    def read(self, op: Op, value: Ref, region: Region | None, device: int) -> Ref:
        """A reference to a region of a captured tensor, or to the whole for None, for `op` to read on a device."""
        return Ref(
            self.whole(op, value.name, device) if region is None else self.gather(op, value.name, region, device)
        )

    def gather(self, op: Op, name: str, region: Region, device: int) -> str:
        """The name of a region of a captured tensor on a device; adds the ops that it needs."""
        if name in self.rest and (name, region, device) not in self.made:
            self._make(name, region, device)
        if (name, region, device) in self.made:
            return self.made[name, region, device]
        found = self._collect(op, name, region, self._nearest(name, device), device)
        self.made[name, region, device] = found
        return found

    def _nearest(self, name: str, device: int) -> Sequence[Part]:
        """The parts of a value, of those with the same region the one beside this device, or else the first."""
        found: dict[Region, Part] = {}
        for part in self.parts[name]:
            if part.region not in found or (
                self._beside(part, device) and not self._beside(found[part.region], device)
            ):
                found[part.region] = part
        return tuple(found.values())

    def _beside(self, part: Part, device: int) -> bool:
        return part.device is not None and self.beside(part.device, device)

    def _make(self, name: str, region: Region, device: int) -> None:
        """Make a region of a value in `rest`, on the device that needs it."""
        made, rule = self.rest[name]
        (part,) = rule(Place(region, device))
        if part.items or not isinstance(self.captured[name], TensorType):
            self.parts[name] = (part,)
            found = part.name
        elif part.region != region:
            found = self.piece(made, name, part, region, device)
            self.made[name, part.region, device] = part.name
        else:
            found = part.name
        self.made[name, region, device] = found

    def _collect(self, op: Op, name: str, region: Region, parts: Sequence[Part], device: int) -> str:
        """The region as one value: pieces of parts, joined along one dimension after the other."""
        pieces = [(part, common) for part in parts if (common := overlap(part.region, region)) is not None]
        if len(pieces) == 1:
            part, common = pieces[0]
            return self.piece(op, name, part, common, device)
        dim = next(dim for dim in range(len(region)) if len({common[dim] for _, common in pieces}) > 1)
        ranges = sorted({common[dim] for _, common in pieces})
        rows = [
            self._collect(
                op, name, (*region[:dim], r, *region[dim + 1 :]), [p for p, c in pieces if c[dim] == r], device
            )
            for r in ranges
        ]
        shape = extent(region)
        whole = region == full(self.shape(name)) and name not in self.kept and name not in self.taken
        type = replace(self.typed(rows[0], shape), grad=any(self._grad(row) for row in rows))
        args = ([Ref(row) for row in rows], dim)
        return self.add(
            op, name if whole else self.free(f"{name}_joined"), device, torch.cat, args, type=type, regions=()
        )

    def piece(self, op: Op, name: str, part: Part, region: Region, device: int) -> str:
        """The name of a region inside a part, cut out on the part's device."""
        if region == part.region:
            return part.name
        where = device if part.device is None else part.device
        key = (part.name, region, where)
        if key not in self.made:
            cut = index(inside(region, part.region), extent(part.region))
            stem = name if part.device is None else f"{part.name}_cut"
            type = self.typed(part.name, extent(region))
            self.made[key] = self.glue(op, stem, where, operator.getitem, (Ref(part.name), cut), type)
        return self.made[key]

    def _grad(self, name: str) -> bool:
        type = self.types[name]
        return isinstance(type, TensorType) and type.grad


def concrete(type: ValueType, sizes: Mapping[str, int]) -> ValueType:
    """The type with numbers in place of symbolic sizes."""
    match type:
        case TensorType(shape=shape):
            return replace(type, shape=tuple(dim_size(dim, sizes) for dim in shape))
        case TupleType(items):
            return TupleType(tuple(concrete(item, sizes) for item in items))
        case ScalarType() | ObjectType():
            return type
