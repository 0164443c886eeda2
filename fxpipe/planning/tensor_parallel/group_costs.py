"""What ops cost on a group of devices that share each of them: what one device of the group computes, keeps and waits
for.

    cost of an op     its time on one device x the share of it that a device computes; of partial sums, to add them up
    cost of an edge   what a device reads and has not, from the others; in backward the gradients go the other way

A value that all devices have is read for free. Its gradient is either whole on each device, or each device has what its
own readers give, a summand: as differentiation is linear, summands are propagated like gradients, and added up where an
op has parts. An op whose result is sharded may also give it to all devices at once, for several readers. In a
transformer this has Megatron's layers as a special case, with and without sequence parallelism (Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022).

Summands of the gradients of parameters that all devices hold are added up with every micro-batch: more often than
needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np

from fxpipe.ir.cluster.network import Rate
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import Graph, Op, op_name
from fxpipe.ir.graph.value_types import TensorType, dim_size
from fxpipe.ir.operators.group_layout import REPLICATED, Layout, OpCut, boxes, volume
from fxpipe.ir.operators.strategy import Region
from fxpipe.ir.plan.profile import OpCost

LAUNCH = 5e-6  # seconds that an op takes however small its part is


@dataclass(frozen=True)
class Group:
    """Devices that share each op.

    - `degree`: how many.
    - `ring`: the rate of an all-reduce among them.
    """

    degree: int
    ring: Rate

    @property
    def per_byte(self) -> float:
        """Seconds per byte that a device receives."""
        return self.ring.per_byte / 2 * self.degree / (self.degree - 1)

    def spread(self, count: float) -> float:
        """Seconds of an all-gather after which each device has `count` bytes that it had not: also of a
        reduce-scatter. An all-reduce is one of each."""
        return self.ring.latency / 2 + count * self.per_byte if count else 0.0


@dataclass(frozen=True)
class Way:
    """How an op is computed.

    - `cut`: how its work is shared.
    - `gathered`: whether its sharded result is then given to all devices.
    - `summand`: of a result that all devices have, whether its gradient on a device is a summand.
    """

    cut: OpCut
    gathered: bool = False
    summand: bool = False

    @property
    def layout(self) -> Layout:
        """What readers find."""
        return REPLICATED if self.gathered else self.cut.layout

    @property
    def whole(self) -> bool:
        """Whether each device has the result and its gradient."""
        return self.layout == REPLICATED and not self.summand


Table = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class CutCosts:
    """What ops cost in each way. A model's layers are mostly alike, so results are remembered for each kind of op."""

    graph: Graph
    sizes: Mapping[str, int]
    known: Mapping[str, OpCost]
    cuts: Mapping[str, Sequence[OpCut]]
    group: Group
    _alone: dict[int, Table] = field(default_factory=dict)
    _edges: dict[object, Table] = field(default_factory=dict)
    _missing: dict[object, int] = field(default_factory=dict)
    _costs: dict[object, OpCost] = field(default_factory=dict)

    @cached_property
    def states(self) -> frozenset[str]:
        return frozenset(state.name for state in self.graph.states)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        tensors = ((name, one) for name, one in self.graph.types.items() if isinstance(one, TensorType))
        return {name: tuple(dim_size(dim, self.sizes) for dim in one.shape) for name, one in tensors}

    @cached_property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """What each op reads: of a piece also the tensor that is taken apart."""
        return {
            op.name: tuple(dict.fromkeys((*op.reads, *(name for cut in self.cuts[op.name] for name, _ in cut.reads))))
            for op in self.graph.ops
        }

    @cached_property
    def readers(self) -> dict[str, int]:
        """How many ops read each value."""
        return Counter(name for op in self.graph.ops for name in set(op.reads))

    @cached_property
    def ways(self) -> dict[str, tuple[Way, ...]]:
        """The ways of each op."""
        found = {}
        for op in self.graph.ops:
            own = [Way(cut) for cut in self.cuts[op.name]]
            if self.readers[op.name] > 1:
                own += [Way(cut, True) for cut in self.cuts[op.name] if cut.layout != REPLICATED]
            found[op.name] = (*own, *(replace(way, summand=True) for way in own if way.whole))
        return found

    @cached_property
    def kinds(self) -> dict[str, int]:
        """A number for each op: the same for two ops that have the same ways at the same costs."""
        types, numbers = self.graph.types, dict[object, int]()
        found = {}
        for op in self.graph.ops:
            names, cost = self.inputs[op.name], self.known[op.name]
            at = {name: position for position, name in enumerate(names)}
            key = (
                op_name(op),
                (cost.forward, cost.backward, cost.saved, cost.output, cost.parameters),
                types[op.name],
                self.readers[op.name] > 1,
                tuple(at[name] for name in op.reads),
                tuple((types[name], name in self.states, name in self.cuts) for name in names),
                tuple((cut.layout, cut.summed, tuple((at[name], parts) for name, parts in cut.reads))
                      for cut in self.cuts[op.name]),
            )  # fmt: skip
            found[op.name] = numbers.setdefault(key, len(numbers))
        return found

    # of an op ----------------------------------------------------------------------------------

    def alone_of_ways(self, op: Op) -> Table:
        """Seconds of forward and backward in each way, without what is read from other devices."""
        kind = self.kinds[op.name]
        if kind not in self._alone:
            self._alone[kind] = np.array([sum(self.alone(op, way)) for way in self.ways[op.name]])
        return self._alone[kind]

    def memory_of_ways(self, op: Op) -> Table:
        """Bytes of parameters and of saved activations in each way: a row for each of the two."""
        return np.array([self.memory(op, way.cut) for way in self.ways[op.name]], float).T

    def memory(self, op: Op, cut: OpCut) -> tuple[int, int]:
        """Bytes of parameters that the op is the first to use, and of what it saves for backward, on one device."""
        cost, n = self.known[op.name], self.group.degree
        reads = [name for name in dict.fromkeys(op.reads) if name in self.shapes and name not in self.states]
        weights = [(self.bytes(name), self.part(name, cut)) for name in self.held(op)]
        held = sum(size for size, _ in weights)
        if op.name in self.products and reads:
            kept = sum(self.bytes(name) * self.part(name, cut) for name in reads) / sum(map(self.bytes, reads))
        else:
            kept = 1.0 if cut.layout == REPLICATED else 1 / n
        parameters = cost.parameters * sum(size * part for size, part in weights) / held if held else 0
        return round(parameters), round(cost.saved * kept)

    def alone(self, op: Op, way: Way) -> tuple[float, float]:
        """Seconds of forward and of backward, without what is read from other devices."""
        share, cost = self.share(op, way.cut), self.known[op.name]
        there, back = _scaled(cost.forward, share), _scaled(cost.backward, share)
        size, group, n = self.bytes(op.name), self.group, self.group.degree
        part = group.spread(size * (n - 1) / n)
        whole = way.cut.layout == REPLICATED
        if way.cut.summed:  # a reduce-scatter, and an all-gather if all devices need the sum
            there += (2 if whole else 1) * part
            back += (2 * way.summand if whole else 1) * part
        if way.gathered:
            there, back = there + part, back + way.summand * part
        if not way.whole or way.gathered:
            copied = sum(self.bytes(name) for name in self.held(op) if self.part(name, way.cut) > 1 / n)
            back += 2 * copied * (n - 1) / n * group.per_byte
        return there, back

    def share(self, op: Op, cut: OpCut) -> float:
        """The share of the op's work that a device has."""
        if cut.layout == REPLICATED and not cut.summed:
            return 1.0
        if op.name in self.products:
            return 1 / self.group.degree
        tensors = [name for name in self.inputs[op.name] if name in self.shapes]
        all_of = self.bytes(op.name) + sum(map(self.bytes, tensors))
        made = self.bytes(op.name) / (1 if cut.layout == REPLICATED else self.group.degree)
        return (made + sum(self.bytes(name) * self.part(name, cut) for name in tensors)) / all_of if all_of else 1.0

    @cached_property
    def products(self) -> frozenset[str]:
        """Ops whose time goes with their work and not with their bytes."""
        named = {"linear", "matmul", "bmm", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d"}
        return frozenset(op.name for op in self.graph.ops if op_name(op) in named)

    def part(self, name: str, cut: OpCut) -> float:
        """The share of a value that the device reads which reads most of it."""
        whole = prod(self.shapes[name])
        regions = dict(cut.reads).get(name)
        if regions is None or not whole:
            return 1.0
        return max(min(1.0, sum(map(volume, own)) / whole) for own in regions)

    def held(self, op: Op) -> list[str]:
        """The parameters that the op reads."""
        return [name for name in dict.fromkeys(op.reads) if name in self.states and self.trained(name)]

    def trained(self, name: str) -> bool:
        kind = self.graph.types[name]
        return isinstance(kind, TensorType) and kind.grad

    def bytes(self, name: str) -> float:
        kind = self.graph.types[name]
        return prod(self.shapes[name]) * DTYPES[kind.dtype].size if isinstance(kind, TensorType) else 0.0

    # of an edge --------------------------------------------------------------------------------

    def edges(self, op: Op, name: str) -> Table:
        """Seconds of both directions between a value and its reader, for each way of the one and of the other."""
        givers, takers = self.ways[name], self.ways[op.name]
        if name not in self.shapes:
            return np.zeros((len(givers), len(takers)))
        key = self.kinds[name], self.kinds[op.name], self.inputs[op.name].index(name)
        if key not in self._edges:
            gives = [(way.layout, way.whole) for way in givers]
            takes = [(dict(way.cut.reads).get(name), self.takes_whole(way)) for way in takers]
            self._edges[key] = np.array([[sum(self.edge(name, *give, *take)) for take in takes] for give in gives])
        return self._edges[key]

    @staticmethod
    def takes_whole(way: Way) -> bool:
        """Whether all devices do the same, so that each has the whole gradient of what it reads."""
        return way.whole and way.cut.layout == REPLICATED and not way.cut.summed

    def edge(
        self, name: str, layout: Layout, whole: bool, wanted: Sequence[Sequence[Region]] | None, alike: bool
    ) -> tuple[float, float]:
        """Seconds for what devices read of a value and have not, and for its gradient back. `whole`: whether each
        device needs the whole gradient; `alike`: whether the readers of all devices give the same one."""
        n, trained = self.group.degree, self.trained(name)
        if layout == REPLICATED:  # summands of the gradient are added up if each device needs it
            part = self.group.spread(self.bytes(name) * (n - 1) / n)
            return 0.0, 2 * part if whole and not alike and trained else 0.0
        missing = self.missing(name, layout, wanted)
        seconds = self.group.spread(min(missing, self.bytes(name) * (n - 1) / n))
        return seconds, seconds if trained and not alike else 0.0

    def missing(self, name: str, layout: Layout, wanted: Sequence[Sequence[Region]] | None) -> float:
        """Bytes that a device reads of a sharded value and has not: of the device that lacks most."""
        shape, n = self.shapes[name], self.group.degree
        key = shape, layout, wanted
        if key not in self._missing:
            most = 0
            for device in range(n):
                own = boxes(layout, shape, n, device)
                regions = [tuple((0, length) for length in shape)] if wanted is None else wanted[device]
                lacks = sum(volume(one) - sum(_common(one, box) for box in own) for one in regions)
                most = max(most, lacks)
            self._missing[key] = most
        return self._missing[key] * self.bytes(name) / max(prod(shape), 1)

    # of what was chosen ------------------------------------------------------------------------

    def costs(self, op: Op, ways: Mapping[str, Way]) -> OpCost:
        """What a device of the group has of an op."""
        own = self.ways[op.name].index(ways[op.name])
        given = tuple((ways[name].layout, ways[name].whole) for name in self.inputs[op.name] if name in ways)
        key = self.kinds[op.name], own, given
        if key not in self._costs:
            self._costs[key] = self._cost(op, ways)
        return replace(self._costs[key], name=op.name)

    def _cost(self, op: Op, ways: Mapping[str, Way]) -> OpCost:
        way, cost, n = ways[op.name], self.known[op.name], self.group.degree
        there, back = self.alone(op, way)
        for name in self.inputs[op.name]:
            if name in ways and name in self.shapes:
                wanted, giver = dict(way.cut.reads).get(name), ways[name]
                ahead, behind = self.edge(name, giver.layout, giver.whole, wanted, self.takes_whole(way))
                there, back = there + ahead, back + behind
        parameters, saved = self.memory(op, way.cut)
        return replace(
            cost,
            forward=there,
            backward=back,
            saved=saved,
            output=cost.output if way.cut.layout == REPLICATED else round(cost.output / n),
            parameters=parameters,
        )


def _scaled(seconds: float, share: float) -> float:
    """The time of a part of an op: what it takes to launch it is not shared."""
    return min(seconds, LAUNCH) + max(seconds - LAUNCH, 0.0) * share


def _common(one: Region, other: Region) -> int:
    return prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(one, other, strict=True))
