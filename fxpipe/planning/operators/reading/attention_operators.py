"""Attention as operators. Heads are channels of (sample, length, channel), and are cut as channels."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.graph.graph import Op, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.operators.operators import Operator
from fxpipe.ir.operators.tensor_axes import Axes, permuted, reshaped, whole
from fxpipe.planning.operators.models import operator_kinds as kinds

from .operator_reader import Reader, Value


def attention(r: Reader, op: Op) -> Value:
    """Scaled dot-product attention. If its heads are the channels of (sample, length, channel) taken apart, they are
    cut as channels; otherwise it is cut only between samples."""
    values = [value for value in map(r.values.get, (ref.name for ref in refs(op.args[:3]))) if isinstance(value, Value)]
    if len(values) == 3 and all(_heads(value) for value in values):
        query, key, value = values
        heads = r.shape(op.name)[1]
        made = kinds.scaled_dot_product(r.name(op), query.operator, key.operator, value.operator, heads)
        return replace(r.make(op, made, query.operator.sizes), axes=query.axes)
    xs = r.operands(op)
    return r.make(op, r.alone(r.name(op), xs, r.shape(op.name), 4.0 * xs[min(1, len(xs) - 1)].sizes[-2]))


def multi_head(r: Reader, op: Op) -> Value:
    """nn.MultiheadAttention as linear layers for queries, keys and values, attention, and a linear layer for the
    result. Its tensors have the samples in their second dimension."""
    read = [r.values.get(arg.name) for arg in op.args[:3]]
    roots = [value.operator for value in read if isinstance(value, Value) and value.axes == _turned(value.operator)]
    if len(roots) < 3:
        raise r.refuse(op, "queries, keys and values are not (sample, length, channel); write batch_first=True")
    name, channel, heads = r.name(op), roots[0].sizes[2], int(argument(op, 4, "num_heads"))
    parts = [
        r.new(kinds.linear(f"{name}.{part}", x, channel, f"{name}.{part}"))
        for part, x in zip("qkv", roots, strict=True)
    ]
    query, key, value = (part.operator for part in parts)
    mixed = r.new(kinds.scaled_dot_product(f"{name}.mix", query, key, value, heads)).operator
    made = r.new(kinds.linear(f"{name}.out", mixed, channel, f"{name}.out"))
    return replace(made, axes=_turned(made.operator))


def _turned(operator: Operator) -> Axes:
    """(length, sample, channel) as a view of the operator's (sample, length, channel); empty for other outputs."""
    return permuted(whole(operator.sizes), (1, 0, 2)) if len(operator.sizes) == 3 else ()


def _heads(value: Value) -> bool:
    """Whether this is (sample, head, length, channel of the head) of an operator's (sample, length, channel)."""
    sizes = value.operator.sizes
    return (
        len(sizes) == 3 and len(value.axes) == 4 and reshaped(permuted(value.axes, (0, 2, 1, 3)), sizes) == whole(sizes)
    )
