"""Means that are added to sums over the samples: each micro-batch takes its share of them.

    loss = cross_entropy(x, y, reduction="sum") / labels + 0.1 * penalty.mean()

The sums of micro-batches add up to that of the batch. Means, and values that are the same for all micro-batches, add up
too if each is multiplied by the micro-batch's share of the samples, b / B. The batch size B is one of the totals.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fxpipe.batching.batch_reductions import Kind, kind_of, kinds, summands
from fxpipe.ir.graph.graph import Graph, Input, Op, Output, Ref, map_leaves
from fxpipe.ir.graph.value_types import BATCH, ScalarType, ValueType
from fxpipe.ir.unique_names import Names


def with_shares(graph: Graph, names: set[str]) -> Graph:
    """The graph, where means that an op among `names` adds to sums are multiplied by the micro-batch's share."""
    done = False
    while not done:
        known = kinds(graph)
        op = next((op for op in graph.ops if op.name in names and _is_uneven(op, known)), None)
        done = op is None
        graph = graph if op is None else _leveled(graph, op, known)
    return graph


def _is_uneven(op: Op, known: Mapping[str, Kind]) -> bool:
    """Whether the op adds means to sums."""
    parts = [kind for arg in summands(op) if (kind := kind_of(arg, known)).what != "zero"]
    elsewhere = len(op.writes) > 1 or (op.writes and op.writes[0] not in op.reads[:1])
    fit = {part.what for part in parts} <= {"same", "pooled"} and any(part.what == "pooled" for part in parts)
    return fit and {part.power for part in parts} == {0, 1} and not elsewhere


def _leveled(graph: Graph, op: Op, known: Mapping[str, Kind]) -> Graph:
    """The graph, where the means that `op` adds are multiplied by the share."""
    name, types = Names(graph.types), graph.types
    graph, whole = _with_batch_size(graph, op, name)
    share = _number(op, name("share"), operator.truediv, (Ref(BATCH), Ref(whole)))
    made = [share]
    means = [arg for arg in summands(op) if kind_of(arg, known).what != "zero" and kind_of(arg, known).power == 0]
    of_mean: dict[Any, Ref] = {}
    for arg in dict.fromkeys(means):
        kind: ValueType = types[arg.name] if isinstance(arg, Ref) else ScalarType("float")
        wish = arg.name if isinstance(arg, Ref) else "share"
        made.append(replace(_number(op, name(wish), operator.mul, (arg, Ref(share.name))), type=kind))
        of_mean[arg] = Ref(made[-1].name)
    args = map_leaves(op.args, lambda leaf: of_mean[leaf] if leaf in means and type(leaf) is not bool else leaf)
    new = replace(op, args=args)
    if op.writes:  # what it wrote into may be the mean: others read the sum only under this op's name
        plain = next(f for f in (operator.add, operator.sub) if ("sub" in str(op.target)) == (f is operator.sub))
        new = replace(new, target=plain, writes=())
    at = graph.ops.index(op)
    return replace(graph, ops=(*graph.ops[:at], *made, new, *graph.ops[at + 1 :]))


def _number(like: Op, name: str, target: Any, args: tuple[Any, ...]) -> Op:
    return replace(like, name=name, target=target, args=args, kwargs={}, type=ScalarType("float"), writes=())


def _with_batch_size(graph: Graph, like: Op, name: Names) -> tuple[Graph, str]:
    """The graph with the batch size among its totals, and the name of that number."""
    totals = graph.totals or replace(
        graph, ops=(), states=(), outputs=(), result=(), loss=None, inputs=tuple(i for i in graph.inputs if i.path)
    )
    known = next((op.name for op in totals.ops if op.args == (Ref(BATCH), 1)), None)
    if known is not None:
        return graph, known
    size = name("batch_size")
    counted = replace(_number(like, size, operator.mul, (Ref(BATCH), 1)), type=ScalarType("int"), regions=())
    totals = replace(
        totals,
        ops=(*totals.ops, counted),
        outputs=(*totals.outputs, Output(size, None, "same")),
        result=(*totals.result, Ref(size)),
    )
    return replace(graph, inputs=(*graph.inputs, Input(size, "", counted.type, None)), totals=totals), size
