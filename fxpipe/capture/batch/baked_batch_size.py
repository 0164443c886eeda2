"""Models whose graph has the batch size as a number: `int(x.shape[0])`, a library that computes shapes as numbers.

Such a graph is valid for one size of micro-batch, which is enough if all micro-batches have that size. To find the
batch dimension of each value, the model is traced again at another batch size: the sizes that change are the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fxpipe.capture.capture_errors import refuse
from fxpipe.capture.nested_values import template
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.ir.graph.graph import Ref
from fxpipe.ir.graph.value_types import BATCH, Dim, TensorType, TupleType, ValueType


def merge(draft: Draft, other: Draft, rows: tuple[int, int], results: tuple[Any, Any]) -> Draft:
    """The draft with the batch in its types, found by comparing it with a trace at another number of rows. Raises
    CaptureError if the two traces have different ops or results."""
    ops, others = draft.graph.ops, other.graph.ops
    if [op.target for op in ops] != [op.target for op in others] or _shape(results[0]) != _shape(results[1]):
        pairs = zip(ops, others, strict=False)
        extra = next((two for one, two in pairs if one.target != two.target), others[-1] if others else None)
        raise refuse(
            extra,
            "forward does another number of things, or returns another number, for every batch size, as where it goes "
            "through the samples one by one",
            "write it as tensor operations over the whole batch",
        )
    types = [_merge(op.type, like.type, rows) for op, like in zip(ops, others, strict=True)]
    made = tuple(replace(op, type=type) for op, type in zip(ops, types, strict=True))
    inputs = tuple(
        replace(item, type=_merge(item.type, like.type, rows))
        for item, like in zip(draft.graph.inputs, other.graph.inputs, strict=True)
    )
    return replace(draft, graph=replace(draft.graph, ops=made, inputs=inputs))


def _merge(one: ValueType, two: ValueType, rows: tuple[int, int]) -> ValueType:
    if isinstance(one, TupleType) and isinstance(two, TupleType):
        return TupleType(tuple(_merge(a, b, rows) for a, b in zip(one.items, two.items, strict=True)))
    if isinstance(one, TensorType) and isinstance(two, TensorType):
        pairs = zip(one.shape, two.shape, strict=True)
        return replace(one, shape=tuple(_dim(a, b, rows) for a, b in pairs))
    return one


def _dim(one: Dim, two: Dim, rows: tuple[int, int]) -> Dim:
    """The dimension that is `one` at the first number of rows and `two` at the second: linear in the batch size.

    >>> _dim(4, 6, (2, 3)), _dim(2, 3, (2, 3)), _dim(5, 5, (2, 3)), _dim(1, 2, (2, 3))
    ('2*b', 'b', 5, 'b - 1')
    """
    if one == two or isinstance(one, str) or isinstance(two, str):
        return one
    factor = (two - one) // (rows[1] - rows[0])
    rest = one - factor * rows[0]
    times = BATCH if factor == 1 else f"{factor}*{BATCH}"
    return times if rest == 0 else f"{times} {'+' if rest > 0 else '-'} {abs(rest)}"


def _shape(result: Any) -> str:
    """The structure of a result, with a mark for each tensor."""
    return str(template(result, lambda leaf: Ref("tensor") if isinstance(leaf, Tensor) else None))
