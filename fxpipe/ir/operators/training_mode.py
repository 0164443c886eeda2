"""Whether a model trains, as an input of its graph: one program for `model.train()` and `model.eval()`.

    training              bool                                   the model's `training` flag, given with each call
    p = either(training, 0.1, 0.0)                               0.1 if training else 0.0
    h = dropout(x, p=0.1, training=training)                     draws only if it is true

A graph has this input if the flags of the model's modules only choose arguments of dropouts. Its dropouts count as
active wherever something is predicted, such as memory. Backward as code differs between the modes, so the graph of a
step that has it is made for one of them, from the same trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.ir.graph.graph import Graph, Op, Ref, map_refs, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import DROPOUTS
from fxpipe.ir.graph.shared_memory_values import memory, trains
from fxpipe.ir.graph.value_types import MODE

DROPOUT, ATTENTION = "dropout", "scaled_dot_product_attention"


def either(training: bool, yes: float, no: float) -> float:
    """The number for training, or that for evaluation."""
    return yes if training else no


def mode_input(graph: Graph) -> str | None:
    """The name of the graph's input that says whether the model trains; None if the graph is for one mode."""
    return next((item.name for item in graph.inputs if item.path == MODE), None)


def switch(op: Op) -> str | None:
    """The value without which a dropout draws nothing: a flag, or a probability. None if it is a literal."""
    name = op_name(op)
    places = {DROPOUT: ((2, "training"), (1, "p")), ATTENTION: ((4, "dropout_p"),)}
    values = [argument(op, *place) for place in places.get(DROPOUT if name in DROPOUTS else name, ())]
    return next((value.name for value in values if isinstance(value, Ref)), None)


def draws_in_training_only(graph: Graph) -> bool:
    """Whether nothing draws random numbers in evaluation: each random op is a dropout that is switched off then."""
    off = {mode_input(graph)}
    off |= {op.name for op in graph.ops if op.target is either and op.args[2] == 0}
    return mode_input(graph) is not None and all(switch(op) in off for op in graph.ops if op.random)


def for_mode(graph: Graph, training: bool | None, traced: Sequence[Op]) -> Graph:
    """The graph for one mode, as if it had been captured in this mode alone; as it is for None. `traced`: all ops of
    the trace, from which the random ones get their numbers: those whose results nobody needs draw, too."""
    mode = mode_input(graph)
    if training is None or mode is None:
        return graph
    numbers = {mode: training, **{op.name: either(training, *op.args[1:]) for op in traced if op.target is either}}

    def settled(op: Op) -> Op:
        if numbers.keys().isdisjoint(op.reads):
            return op
        args, kwargs = map_refs((op.args, op.kwargs), lambda ref: numbers.get(ref.name, ref))
        now = replace(op, args=args, kwargs=kwargs)
        return now if draws(now) else replace(now, writes=(), draw=None)

    count = itertools.count()
    draw: dict[int | None, int] = {op.draw: next(count) for op in map(settled, traced) if op.random}

    def of(graph: Graph) -> Graph:
        ops = [settled(op) for op in graph.ops if op.name not in numbers]
        ops = [op if op.draw == (now := draw.get(op.draw)) else replace(op, draw=now) for op in ops]
        inputs = tuple(item for item in graph.inputs if item.path != MODE)
        totals = None if graph.totals is None else of(graph.totals)
        return replace(graph, training=training, inputs=inputs, ops=tuple(ops), totals=totals)

    return of(graph)


def draws(op: Op) -> bool:
    """Whether a dropout or attention with literals for its mode draws random numbers."""
    if op_name(op) == ATTENTION:
        return bool(argument(op, 4, "dropout_p", 0.0))
    return trains(op) and argument(op, 1, "p", 0.5) != 0


def is_seen(graph: Graph) -> bool:
    """Whether more than values may differ between the modes: in evaluation a dropout gives its argument itself. So a
    later write into one would change both, and a result may be the very tensor of an argument or of another result."""
    mode = mode_input(graph)
    if mode is None:
        return False
    either_way = {mode, *(op.name for op in graph.ops if op.target is either)}
    root = memory(graph.ops, graph.types)
    shared: set[str] = set()
    for op in graph.ops:
        if any(root(name) in shared for name in op.writes):
            return True
        if op_name(op) in DROPOUTS and not either_way.isdisjoint(op.reads):
            shared.add(root(op.name))
    lasting = [item.name for item in graph.inputs] + [state.name for state in graph.states]
    given = [root(name) for name in dict.fromkeys(output.value for output in graph.outputs)]
    seen = shared.intersection(given)
    return any(given.count(name) > 1 for name in seen) or any(root(name) in seen for name in lasting)
