"""A graph with another floating-point type: for estimates of a model in half precision, from the model as it is
written. Only types change; to run the model so, it has to be converted (`model.bfloat16()`)."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType, TupleType, ValueType

FLOATS = frozenset({"f64", "f32", "f16", "bf16"})


def cast(graph: Graph, dtype: str) -> Graph:
    """The graph with all floating-point tensors of element type `dtype`: inputs, states and the results of ops."""
    return replace(
        graph,
        inputs=tuple(replace(item, type=_cast(item.type, dtype)) for item in graph.inputs),
        states=tuple(replace(state, type=_cast(state.type, dtype)) for state in graph.states),
        ops=tuple(replace(op, type=_cast(op.type, dtype)) for op in graph.ops),
        totals=None if graph.totals is None else cast(graph.totals, dtype),
        epilogue=None if graph.epilogue is None else cast(graph.epilogue, dtype),
    )


def _cast(type: ValueType, dtype: str) -> ValueType:
    if isinstance(type, TupleType):
        return TupleType(tuple(_cast(item, dtype) for item in type.items))
    return replace(type, dtype=dtype) if isinstance(type, TensorType) and type.dtype in FLOATS else type
