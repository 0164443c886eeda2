"""Which values may need a gradient because of a submodule that is kept whole.

Whether its results need a gradient was learnt by running it, but may differ when its forward takes another branch. So
the types of the graph have a gradient wherever there may be one.

    y, mask = router(x)      y needs a gradient, mask needed none
    z = mask * 2             may need one, and has a place for it where it moves between stages
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import unsure
from fxpipe.ir.graph.value_types import TensorType, TupleType, ValueType

FLOATS = ("f", "bf", "c")


def with_possible_gradients(graph: Graph) -> Graph:
    """The graph, of a call with gradients enabled, with the types of values that may need one."""
    found = unsure(graph.ops)
    ops = (replace(op, type=_with_gradient(op.type)) if op.name in found else op for op in graph.ops)
    return replace(graph, ops=tuple(ops)) if found else graph


def _with_gradient(kind: ValueType) -> ValueType:
    if isinstance(kind, TupleType):
        return TupleType(tuple(map(_with_gradient, kind.items)))
    if isinstance(kind, TensorType) and kind.dtype.startswith(FLOATS):
        return replace(kind, grad=True)
    return kind
