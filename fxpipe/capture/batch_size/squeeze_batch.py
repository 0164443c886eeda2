"""`x.squeeze()` of an f32[b, 1] removes the second dimension, and for a batch of one also the first.

A micro-batch may have one sample although the batch has more. So the removed dimensions are written into the op; this
differs from the model only for a whole batch of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxpipe.batching.batch_facts import batch_dims
from fxpipe.ir.graph.graph import Graph, Op, Ref, called
from fxpipe.ir.graph.value_types import TensorType, ValueType


def with_named_squeezes(graph: Graph) -> tuple[Graph, tuple[Op, ...]]:
    """The graph with explicit dimensions in each squeeze of a batched value without them; and the original ops."""
    types = graph.types
    found = {op.name: dims for op in graph.ops if (dims := _dimensions(op, types)) is not None}
    ops = tuple(replace(op, args=(*op.args, found[op.name])) if op.name in found else op for op in graph.ops)
    return replace(graph, ops=ops), tuple(op for op in graph.ops if op.name in found)


def _dimensions(op: Op, types: Mapping[str, ValueType]) -> int | tuple[int, ...] | None:
    """The dimensions that a squeeze without dimensions removes from a batched value; None for other ops."""
    if called(op) not in ("squeeze", "squeeze_") or len(op.args) != 1 or op.kwargs or not isinstance(op.args[0], Ref):
        return None
    kind = types[op.args[0].name]
    if not isinstance(kind, TensorType) or not batch_dims(kind):
        return None
    dims = tuple(dim for dim, size in enumerate(kind.shape) if size == 1)
    return dims[0] if len(dims) == 1 else dims
