"""From a captured graph and a strategy to a graph that computes the same and in which every op has a device.

    conv1  sample/2 on 0 1             device 0   conv1_0 = conv2d(image_0, weight, bias)
    fc     channel/2 on 0 1            device 1   conv1_1 = conv2d(image_1, weight, bias)
                                       device 0   flat = cat([flatten_0, flatten_1])
                                       device 0   fc_0 = linear(flat, weight_0, bias_0)
                                       device 1   ...

Where a region has several holders, the op is made on the device of each. A product that is cut by what it sums over has
a partial sum on each device, and on each device that reads it the sum:

    fc2  summed/2 on 0 1               device 0   fc2_partial = linear(x[:, 0:8], weight[:, 0:8], bias)
                                       device 1   fc2_partial_0 = linear(x[:, 8:16], weight[:, 8:16])
                                       device 0   fc2_sum = fc2_partial + fc2_partial_0
                                       device 1   fc2_sum_0 = fc2_partial + fc2_partial_0

Each op falls into one of these:

- a number that is known from the sizes: it becomes a literal;
- an op of an operator: the op's rule makes parts, where the strategy places them;
- an op that depends on inputs and states alone, such as a mask or positions: every device makes what it needs of it;
- any other op, such as an increment of a counter, or random numbers that depend on no sample: it runs once.

At the end unused ops are removed, such as the cell state of an LSTM after its last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add as operator_add

from fxpipe.errors import PlanError
from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.evaluate_graph import call
from fxpipe.ir.graph.graph import Graph, Op, Ref, map_refs, op_name, show_op
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.value_types import ScalarType, TensorType, TupleType
from fxpipe.ir.operators.operator_map import Reading, View
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Region, Strategy, cut, split
from fxpipe.ir.operators.tensor_axes import sizes_of
from fxpipe.ir.operators.tensor_axes import whole as as_it_is
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part, concrete
from fxpipe.passes.sharding.part_regions import Place, Places, Range, box, extent, full, places
from fxpipe.passes.sharding.rules import rule_of
from fxpipe.passes.sharding.sharding_rule import WHOLE, Rule

Cut = Callable[["Sharder", Op], "tuple[Part, ...] | None"]  # the parts of an op's result, None if it has no samples


def shard(graph: Graph, reading: Reading, strategy: Strategy, sizes: Mapping[str, int]) -> Placed:
    """The graph that computes the same as `graph`, placed as the strategy says. `sizes`: a number for each size.

    It has the same inputs, states and outputs, and the same gradients. Each part of a random op draws its own numbers,
    which differ from those of the plain model. Raises PlanError, with the op and the user's line, if an op writes
    memory that has several names, and for a strategy with partial sums of other than linear layers and matrix products.
    """
    for operator, config in zip(reading.operators, strategy.configs, strict=True):
        made = [rule_of(op).partial for op in graph.ops if op.name in reading.ops[operator.name]]
        if config.holders > 1 and operator.summed and not any(made):
            raise PlanError(
                f"operator {operator.name!r} is cut {cut(operator, config)}: partial sums of kind {operator.kind!r} "
                "can be simulated, but only those of linear layers and matrix products can be run; give it holders=1"
            )
    samples = frozenset(reading.views) | {item.name for item in graph.inputs if item.batch_dim is not None}
    sharder = Sharder(graph, sizes, samples, _ByOperator(reading, strategy))
    placed = sharder.placed()
    return (
        replace(placed, groups=_groups(placed, sharder.b.made_for, reading, strategy))
        if strategy.recomputed
        else placed
    )


def _groups(placed: Placed, made_for: Mapping[str, str], reading: Reading, strategy: Strategy) -> dict[str, int]:
    """For each op that was made for one of an operator the group in which that is recomputed, -1 for none."""
    operators = {op.name: reading.views.get(made_for[op.name]) for op in placed.graph.ops}
    return {name: strategy.group_of.get(view.operator, -1) for name, view in operators.items() if view is not None}


class Sharder:
    """Rewrites a graph op by op. `samples`: the values that depend on the samples. `cut` makes the parts of an op whose
    result depends on them."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int], samples: frozenset[str], cut: Cut) -> None:
        self.b = GraphRewriter(graph, sizes)
        self.b.samples = samples
        self.graph, self.cut = graph, cut
        self.changed = {name for op in graph.ops for name in op.writes if name in self.b.states}
        self.homes: dict[str, int] = {}

    def placed(self) -> Placed:
        for op in self.graph.ops:
            self.read(op)
        names = {output.value: self.returned(output.value) for output in self.graph.outputs}
        rename = lambda ref: Ref(names.get(ref.name, ref.name))  # noqa: E731
        whole = replace(
            self.graph,
            inputs=tuple(replace(item, type=concrete(item.type, self.b.sizes)) for item in self.graph.inputs),
            states=self.graph.states,
            ops=tuple(self.b.ops),
            outputs=tuple(replace(output, value=names[output.value]) for output in self.graph.outputs),
            result=map_refs(self.graph.result, rename),
            loss=self.graph.loss and names[self.graph.loss],
        )
        made = replace(whole, ops=without_dead_ops(whole).ops)
        return Placed(made, {op.name: self.b.devices[op.name] for op in made.ops})

    def read(self, op: Op) -> None:
        """Make the results of the captured op, or note how to make them when they are needed."""
        b = self.b
        known = all(name in b.numbers for name in op.reads)
        if isinstance(op.type, ScalarType) and known and op.name not in b.kept:
            b.numbers[op.name] = call(op, b.numbers)
            return
        self.refuse(op)
        touched = self.changed.intersection((*op.reads, *op.writes))
        if touched and op_name(op) != "batch_norm":
            self.once(op, self.home(sorted(touched)))
        elif (parts := self.cut(self, op)) is not None:
            b.parts[op.name] = parts
        elif op.random or not isinstance(op.type, (TensorType, TupleType)):
            self.once(op, 0)
        else:
            b.rest[op.name] = (op, partial(self.at_hand, op))

    def refuse(self, op: Op) -> None:
        """Raise PlanError if the op writes memory that has several names."""
        written = [name for name in op.writes if name not in self.b.states]
        if written and (not op.args or op.args[0] != Ref(written[0]) or len(written) > 1):
            raise PlanError(
                f"{show_op(op)}: it writes memory that is seen as {', '.join(written)}, which parts on several devices "
                f"cannot share; write the new value to a new tensor"
            )

    def home(self, states: list[str]) -> int:
        """The device of states that forward changes: all ops that use them run there."""
        device = next((self.homes[name] for name in states if name in self.homes), 0)
        self.homes.update(dict.fromkeys(states, device))
        return device

    def once(self, op: Op, device: int) -> None:
        self.b.parts[op.name] = WHOLE.make(self.b, op, (Place(full(self.shape(op)), device),))

    def at_hand(self, op: Op, place: Place) -> tuple[Part, ...]:
        """A region of a value that every device can make; dimensions that cannot be cut are whole."""
        if not isinstance(op.type, TensorType):
            return WHOLE.make(self.b, op, (place,))
        rule, shape = self.rule(op), self.shape(op)
        allowed = set(rule.cuts(self.b, op))
        region = tuple(r if dim in allowed else (0, shape[dim]) for dim, r in enumerate(place.region))
        return self.make(op, (Place(region, place.device),))

    def make(self, op: Op, wanted: Places) -> tuple[Part, ...]:
        """The parts at the `wanted` places. If there is only one, which is the whole, the op stays as it is."""
        rule, source = self.rule(op), self.reduced(op)
        uncut = len(wanted) == 1 and wanted[0].region == full(self.b.shape(source) if source else self.shape(op))
        if uncut and rule.plain and not (op.writes and not self.changed.issuperset(op.writes)):
            return WHOLE.make(self.b, op, (Place(full(self.shape(op)), wanted[0].device),))
        return rule.make(self.b, op, wanted)

    def partial_sum(self, op: Op, region: Region, device: int, ranges: Sequence[Range]) -> str:
        """The name of a region of a product, as far as these ranges of the dimension add to it that is summed over."""
        made, place, names = self.rule(op).partial, Place(region, device), []
        assert made is not None, f"{op.name} is no product"
        for one in ranges:
            target, args, kwargs = made(self.b, op, place, one)
            type = self.b.typed(op.name, extent(region))
            names.append(self.b.add(op, self.b.free(f"{op.name}_partial"), device, target, args, kwargs, type=type))
        return self.total(op, names, region, device).name

    def total(self, op: Op, names: Sequence[str], region: Region, device: int) -> Part:
        """The sum of values on a device, always in the same order."""
        first, *others = names
        for one in others:
            type = self.b.typed(op.name, extent(region))
            first = self.b.glue(op, f"{op.name}_sum", device, operator_add, (Ref(first), Ref(one)), type)
        return Part(first, region, device)

    def rule(self, op: Op) -> Rule:
        return rule_of(op, self.reduced(op) is not None)

    def reduced(self, op: Op) -> str | None:
        """The tensor of samples that the op reduces to a number; None if it does not."""
        first = argument(op, 0, "input")
        if (
            self.shape(op) == ()
            and self.b.is_tensor(first)
            and first.name in self.b.samples
            and self.b.shape(first.name)
        ):
            return str(first.name)
        return None

    def shape(self, op: Op) -> tuple[int, ...]:
        """The shape of the op's result, or of its first item if that is a tuple."""
        type = self.b.captured[op.name]
        while isinstance(type, TupleType):
            type = type.items[0]
        return tuple(map(int, type.shape)) if isinstance(type, TensorType) else ()

    def returned(self, name: str) -> str:
        """The name of a returned value: the whole of it, on the device of its first part."""
        b = self.b
        op = next((op for op in self.graph.ops if op.name == name), None)
        if op is None:
            return name
        device = b.parts[name][0].device if name in b.parts else 0
        b.kept.discard(name)
        return b.whole(op, name, device or 0)


class _ByOperator:
    """The parts of an op's result, as a strategy cuts its operator."""

    def __init__(self, reading: Reading, strategy: Strategy) -> None:
        self.reading = reading
        self.configs = dict(zip((o.name for o in reading.operators), strategy.configs, strict=True))

    def __call__(self, s: Sharder, op: Op) -> tuple[Part, ...] | None:
        view = self.reading.views.get(op.name)
        if view is None or self.reading.operators.operator(view.operator).kind == "input":
            return None
        return self.held(s, op, self.places(s, op, view))

    def held(self, s: Sharder, op: Op, wanted: Places) -> tuple[Part, ...]:
        """The parts at the `wanted` places, on all devices that hold them. What is random, or changes what it reads, is
        made once, on the first device."""
        many = max(len(place.holders) for place in wanted)
        if not many or op.random or op.writes or not isinstance(op.type, TensorType):
            return s.make(op, wanted)
        operator = self.reading.operators.operator(self.reading.views[op.name].operator)
        if operator.summed and s.rule(op).partial is not None:
            return tuple(part for place in wanted for part in self.added(s, op, place, operator.summed))
        turns = [tuple(Place(place.region, place.holders[at]) for place in wanted) for at in range(many)]
        return tuple(part for turn in dict.fromkeys(turns) for part in s.make(op, turn))

    @staticmethod
    def added(s: Sharder, op: Op, place: Place, summed: int) -> Iterator[Part]:
        """Partial sums of a product, one on each holder's device, and on each of these devices the sum of all."""
        names = [
            s.partial_sum(op, place.region, device, [split(summed, len(place.holders), at)])
            for at, device in enumerate(place.holders)
        ]
        for device in dict.fromkeys(place.holders):
            yield s.total(op, names, place.region, device)

    def places(self, s: Sharder, op: Op, view: View) -> Places:
        """The places of an op's parts under the strategy."""
        operator, config = self.reading.operators.operator(view.operator), self.configs[view.operator]
        allowed = set(s.rule(op).cuts(s.b, op))
        source = s.reduced(op)
        if source is None:
            axes, shape = view.axes, s.shape(op)
            known = sizes_of(axes) == shape
            return places(operator, config, shape, allowed, lambda region: box(region, axes) if known else None)
        return places(operator, config, s.b.shape(source), allowed, self.over(s.b, source, operator.sizes))

    def over(self, b: GraphRewriter, source: str, sizes: tuple[int, ...]) -> Callable[[Region], Region | None]:
        """A function from a region of an operator of these `sizes` to a region of the tensor `source`, which the op
        reduces to a number. The operator's sizes are those of the tensor, with or without its last dimension."""
        shape = b.shape(source)
        view = self.reading.views.get(source)
        inside = self.reading.operators.operator(view.operator).sizes if view else shape
        axes = view.axes if view else as_it_is(shape)
        if inside[:-1] != sizes and inside != sizes:
            inside, axes = shape, as_it_is(shape)
        if (inside[:-1] != sizes and inside != sizes) or sizes_of(axes) != shape:
            return lambda region: None
        last = () if inside == sizes else ((0, inside[-1]),)
        return lambda region: box((*region, *last), axes)
