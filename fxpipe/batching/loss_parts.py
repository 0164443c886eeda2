"""Parts of a loss that are no sum or mean over its samples, while the rest is.

    loss = cross_entropy(logits, labels) + 0.02 * balance(router_logits)

The cross entropy of the batch can be computed from that of the micro-batches, and how evenly a router spreads the
batch over its experts cannot: each micro-batch has a number of its own. What the user says of that number by `reduce`,
under the name of its variable, holds for this part alone, and so does what is said of the whole loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fxpipe.ir.graph.graph import Graph, Op, Ref, called
from fxpipe.ir.graph.ops import DIVIDE, LINEAR, MULTIPLY

from .batch_dimension import follow
from .batch_facts import batch_dims
from .batch_reductions import kinds, summands
from .mixed_samples import Reduce

COMBINED = ("mean", "sum")


def with_named_parts(graph: Graph, values: Sequence[str], reduce: Reduce) -> Graph:
    """The graph with those of its values as `parts` that `reduce` names and that go into an output among `values`."""
    if not isinstance(reduce, Mapping):
        return graph
    depends, ops = follow(graph).depends, {op.name: op for op in graph.ops}
    read = {value: needed(graph, [value]) for value in values} if reduce else {}
    inside = {name for value, names in read.items() for name in names if name != value}
    named = {name: how for name, how in reduce.items() if how in COMBINED and name in ops and name in inside}
    alone = [name for name in named if name in depends and not batch_dims(ops[name].type)]
    if graph.loss is not None and "loss" in alone:  # it says how that of a step is put together
        alone.remove("loss")
    return replace(graph, parts=(*graph.parts, *((name, named[name]) for name in alone)))


def needed(graph: Graph, values: Sequence[str]) -> set[str]:
    """The names of all values that `values` are computed from, and `values`."""
    found = set(values)
    for op in reversed(graph.ops):
        if op.name in found:
            found.update(op.reads)
    return found


def unknown_parts(graph: Graph, value: str) -> tuple[Op, ...]:
    """The summands of a value that are no sum or mean over the samples; none if no other summand is."""
    known, ops = kinds(graph), {op.name: op for op in graph.ops}

    def walk(name: str) -> Iterator[tuple[Op, bool]]:
        op = ops.get(name)
        if op is None or known[name].what == "zero":
            return
        if known[name].reduce is not None:
            yield op, True
            return
        added = [arg.name for arg in summands(op) if isinstance(arg, Ref)] if called(op) != "where" else []
        if len(added) > 1:
            for one in added:
                yield from walk(one)
        elif (inside := _scaled(op, graph)) is not None and len(list(walk(inside))) > 1:
            yield from walk(inside)
        else:
            yield op, False

    found = list(walk(value))
    return tuple(op for op, fine in found if not fine) if any(fine for _, fine in found) else ()


def with_unknown_parts(graph: Graph, value: str, how: str) -> Graph:
    """The graph, where the unknown parts of a value are put together as the user says of the value."""
    parts = tuple((op.name, how) for op in unknown_parts(graph, value))
    return replace(graph, parts=(*graph.parts, *parts))


def name_of(part: Op, graph: Graph) -> str:
    """The user's name for a part: that of its variable, or of what it is a multiple of."""
    ops = {op.name: op for op in graph.ops}
    op: Op | None = part
    while op is not None and op.name.rstrip("_0123456789") == called(op).rstrip("_"):
        inside = _scaled(op, graph)
        op = ops.get(inside) if inside is not None else None
    return part.name if op is None else op.name


def _scaled(op: Op, graph: Graph) -> str | None:
    """The value of which this op makes a multiple, or a copy of another type."""
    depends = follow(graph).depends
    read = [name for name in op.reads if name in depends]
    name = called(op).rstrip("_")
    multiple = name in LINEAR | MULTIPLY or (name in DIVIDE and [op.first] == read)
    return read[0] if len(read) == 1 and multiple and not op.writes else None
