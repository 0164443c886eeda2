"""Turns a plan with tensor parallelism into a graph that can be run: each op on the devices of its stage's groups.

    stage 0, group of 2        y = linear(x, w)    y_0 = linear(x, w[:, rows of 0])      on device 0
                                                   y_1 = linear(x, w[:, rows of 1])      on device 1
    summed, replicated         z = linear(y, v)    z_partial_0, z_partial_1              on devices 0 and 1
                                                   z_0 = z_partial_0 + z_partial_1       on device 0
                                                   z_1 = z_partial_0 + z_partial_1       on device 1

Of more than two devices, each adds up a slice of such a sum, and then takes the slices of the others: an all-reduce, as
a reduce-scatter and an all-gather. What moves are values of the graph, so gradients go back in the same way.

A stage has a group of devices for each replica, and replicas share the samples. Device numbers run through the stages,
their groups, and the devices of a group. Of a value that all devices of a group have, each reads its own copy; device l
of a larger or smaller group reads that of device l modulo the size of the group that has it. An op that changes a state
runs on the first device of a group alone, as does a random op that all devices would have whole: each would draw other
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

from fxpipe.ir.graph.graph import Graph, Op, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.group_layout import REPLICATED, Layout, OpSharding, boxes, volume
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Region, split
from fxpipe.ir.replica_shares import dealt
from fxpipe.passes.sharding.graph_rewriter import Part
from fxpipe.passes.sharding.op_cuts import batch_symbol
from fxpipe.passes.sharding.part_regions import Place, Range, full, overlap
from fxpipe.passes.sharding.shard import Sharder

Groups = tuple[int, int]  # how many a stage has, and of how many devices each


def share(
    graph: Graph,
    sizes: Mapping[str, int],
    stage_of: Mapping[str, int],
    groups: Sequence[Groups],
    shardings: Mapping[str, OpSharding],
    whole_sums: bool = False,
) -> Placed:
    """The graph that computes the same as `graph`, placed on the groups of devices of each stage.

    - `sizes`: a number for each size.
    - `stage_of`: the stage of each op; `groups`: how many groups each stage has, and of how many devices each.
    - `shardings`: how each op is cut; ops that are not named are replicated.
    - `whole_sums`: whether a device adds up the whole of a sum that all have: over ranks, where that is an all-reduce.
    """
    samples = {item.name for item in graph.inputs if item.batch_dim is not None}
    for op in graph.ops:
        if samples.intersection(op.reads):
            samples.add(op.name)
    sharing = _ByGroup(graph, sizes, stage_of, groups, shardings, whole_sums)
    sharder = Sharder(graph, sizes, frozenset(samples), sharing)
    lanes = [(at, degree) for count, degree in groups for _ in range(count) for at in range(degree)]
    sharder.b.beside = lambda holder, reader: lanes[holder][0] == lanes[reader][0] % lanes[holder][1]
    return sharder.placed()


class _ByGroup:
    """The parts of an op's result on the groups of its stage."""

    def __init__(
        self,
        graph: Graph,
        sizes: Mapping[str, int],
        stage_of: Mapping[str, int],
        groups: Sequence[Groups],
        shardings: Mapping[str, OpSharding],
        whole_sums: bool,
    ) -> None:
        self.stage_of, self.groups, self.shardings, self.whole_sums = stage_of, groups, shardings, whole_sums
        self.first = list(accumulate((count * degree for count, degree in groups), initial=0))
        self.symbol = batch_symbol(graph)
        self.batch = sizes.get(self.symbol, 1)

    def __call__(self, s: Sharder, op: Op) -> tuple[Part, ...] | None:
        if op.name not in s.b.samples or not isinstance(op.type, TensorType):
            return None
        source = s.reduced(op)
        return tuple(self.parts(s, op)) if source is None else s.make(op, tuple(self.over(s, op, source)))

    def over(self, s: Sharder, op: Op, source: str) -> Sequence[Place]:
        """The places of an op that reduces the tensor `source` to a number: where its parts are, if the op's stage has
        them and may cut it like that, else one."""
        stage, shape = self.stage_of[op.name], s.b.shape(source)
        allowed = set(s.rule(op).cuts(s.b, op))
        parts = {part.region: part for part in reversed(s.b.parts.get(source, ()))}.values()
        own = range(*self.first[stage : stage + 2])
        places = [Place(part.region, part.device) for part in parts if part.device is not None and part.device in own]
        cut = {dim for place in places for dim, ends in enumerate(place.region) if ends != (0, shape[dim])}
        if cut <= allowed and sum(volume(place.region) for place in places) == prod(shape):
            return places
        return [Place(full(shape), self.first[stage])]

    def parts(self, s: Sharder, op: Op) -> Iterator[Part]:
        stage, found = self.stage_of[op.name], self.shardings.get(op.name, OpSharding(op.name, op_name(op)))
        replicas, degree = self.groups[stage]
        first, every = self.first[stage], range(degree)
        rows = list(enumerate(self.rows(s, op, replicas)))

        def on(device: int) -> tuple[Place, ...]:
            """The samples of all replicas, each on this device of its group."""
            return tuple(Place(own, first + replica * degree + device) for replica, own in rows)

        if (op.random and found.layout == REPLICATED) or s.changed.intersection(op.reads):
            yield from s.make(op, on(0))
        elif found.summed:
            for replica, own in rows:
                yield from self.summed(s, op, found, own, [first + replica * degree + at for at in every])
        elif found.layout == REPLICATED:
            for at in every:
                yield from s.make(op, on(at))
        else:
            shape = s.shape(op)
            cut = ((box, place) for at in every for box in boxes(found.layout, shape, degree, at)
                   for place in on(at))  # fmt: skip
            regions = ((overlap(box, place.region), place.device) for box, place in cut)
            yield from s.make(op, tuple(Place(region, device) for region, device in regions if region is not None))

    def rows(self, s: Sharder, op: Op, replicas: int) -> list[Region]:
        """The region of each replica: its samples, if the op can be cut between them."""
        shape = s.shape(op)
        types, allowed = s.b.symbolic[op.name], set(s.rule(op).cuts(s.b, op))
        assert isinstance(types, TensorType)
        names = [set(re.findall(r"\w+", str(size))) for size in types.shape]
        dims = (at for at in sorted(allowed) if self.symbol in names[at] and shape[at] % self.batch == 0)
        dim = next(dims, None)
        if replicas == 1 or dim is None:
            return [full(shape)]
        each = shape[dim] // self.batch  # above 1 where samples and positions are one dimension
        ends = [each * end for end in accumulate(dealt(self.batch, replicas), initial=0)]
        ranges: list[Range] = [(a, b) for a, b in pairwise(ends) if b > a]
        return [(*full(shape[:dim]), own, *full(shape[dim + 1 :])) for own in ranges]

    def summed(self, s: Sharder, op: Op, found: OpSharding, rows: Region, devices: Sequence[int]) -> Iterator[Part]:
        """The sums of partial sums: whole on each device, or the part of it that the device has."""
        inner, degree = s.b.shape(argument(op, 0, "input").name)[-1], len(devices)
        sums = []
        for at, device in enumerate(devices):
            ranges = [own for (own,) in boxes(Layout(0, found.summed), (inner,), degree, at)]
            sums.append(Part(s.partial_sum(op, rows, device, ranges), rows, device))
        for at, device in enumerate(devices):
            own = boxes(found.layout, s.shape(op), degree, at)
            wanted = [common for box in own if (common := overlap(box, rows)) is not None]
            if found.layout == REPLICATED and (slice_ := self.slice_of(rows, at, degree)) is not None:
                wanted = [slice_]
            for region in wanted:
                yield s.total(op, [s.b.piece(op, op.name, one, region, device) for one in sums], region, device)

    def slice_of(self, rows: Region, at: int, degree: int) -> Region | None:
        """The slice that a device adds up of a sum that all devices will have: each adds up one, and takes the others
        from those that have them. So each of n devices sends 2 (n - 1) / n of the sum, as in a ring, in place of n - 1.
        None for two devices, which send each other as much either way, if there is nothing to cut, and for an
        all-reduce, which does the same."""
        dim = next((dim for dim, (first, after) in enumerate(rows) if after - first >= degree), None)
        if self.whole_sums or degree == 2 or dim is None:
            return None
        first, after = rows[dim]
        own = (first + end for end in split(after - first, degree, at))
        return *rows[:dim], (next(own), next(own)), *rows[dim + 1 :]
