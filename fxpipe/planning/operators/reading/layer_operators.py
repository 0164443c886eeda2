"""Layers as operators, with the sizes and weights that they have in the graph."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fxpipe.ir.graph.graph import Op, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.operators.convolution_windows import of_convolution, of_pool
from fxpipe.ir.operators.tensor_axes import axis, whole
from fxpipe.planning.operators.models import operator_kinds as kinds

from .operator_reader import Held, Reader, Value
from .reshape_operators import alone


def linear(r: Reader, op: Op) -> Value:
    """A linear layer over the last dimension; the other dimensions may be a view."""
    x = r.first(op)
    if not r.lasts(x):
        x = Value(operator := r.whole(op, x), whole(operator.sizes), x.name)
    channel = r.shape(op.name)[-1]
    sizes = (*x.operator.sizes[:-1], channel)
    made = r.make(op, kinds.linear(r.name(op), x.operator, channel), sizes)
    return replace(made, axes=(*x.axes[:-1], axis(len(sizes) - 1, channel)))


def matmul(r: Reader, op: Op) -> Value:
    """A product of two tensors that depend on the samples; if the second does not, it is a linear layer."""
    a, b = (r.values[ref.name] for ref in refs((op.args, dict(op.kwargs))) if ref.name in r.values)
    if isinstance(a, Value) and isinstance(b, Held):
        return linear(r, op)
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return alone(r, op)
    x, y = r.whole(op, a), r.whole(op, b)
    if len(x.sizes) == len(y.sizes) > 2 and x.sizes[:-2] == y.sizes[:-2]:
        return r.make(op, kinds.matmul(r.name(op), x, y))
    return r.make(op, r.alone(r.name(op), (x, y), r.shape(op.name), 2.0 * x.sizes[-1]))


def embedding(r: Reader, op: Op) -> Value:
    """Rows of a table, one for each word."""
    tokens = next(value for value in r.known((op.args, dict(op.kwargs))) if isinstance(value, Value))
    words = r.shape(argument(op, 1, "weight").name)[0]
    return r.make(op, kinds.embedding(r.name(op), r.whole(op, tokens), words, r.shape(op.name)[-1]))


def conv(r: Reader, op: Op) -> Value:
    """A convolution over one or two dimensions; a dilated kernel has a wider window."""
    x, weight = r.whole(op, r.first(op)), r.shape(argument(op, 1, "weight").name)
    window, stride, before = of_convolution(op, weight[2:])
    if len(window) > 2:
        raise r.refuse(op, "convolutions have one or two dimensions")
    made = kinds.convolution(r.name(op), x, weight[0], window, stride, before)
    return r.make(op, replace(made, work=2.0 * prod(weight[1:])))


def pool(r: Reader, op: Op) -> Value:
    """A pool over one or two dimensions; an adaptive one only if its windows are all alike."""
    x = r.whole(op, r.first(op))
    rank = len(x.sizes) - 2
    if op_name(op).startswith("adaptive"):
        sizes = list(zip(x.sizes[2:], r.shape(op.name)[2:], strict=True))
        if any(size % left for size, left in sizes):
            return alone(r, op)
        window = tuple(size // left for size, left in sizes)
        stride, before = window, (0,) * rank
    else:
        window, stride, before = of_pool(op, rank)
    return r.make(op, kinds.pooling(r.name(op), x, window, stride, before))


def batch_norm(r: Reader, op: Op) -> Value:
    """Batch norm by channel, with statistics of all samples."""
    return r.make(op, kinds.batch_norm(r.name(op), r.whole(op, r.first(op))))


def layer_norm(r: Reader, op: Op) -> Value:
    """Layer norm over the last dimension; over several dimensions it is cut only between samples."""
    if len(argument(op, 1, "normalized_shape")) > 1:
        return alone(r, op)
    return r.make(op, kinds.layer_norm(r.name(op), r.whole(op, r.first(op))))


def softmax(r: Reader, op: Op) -> Value:
    """Softmax over the last dimension; over another one it is cut only between samples."""
    x = r.whole(op, r.first(op))
    dim = argument(op, 1, "dim")
    last = dim is not None and dim % len(x.sizes) == len(x.sizes) - 1
    return r.make(op, kinds.softmax(r.name(op), x)) if last else alone(r, op)


def cell(r: Reader, op: Op) -> Value:
    """A step of a recurrent layer, which reads its input and, if it is not all zeros, the state."""
    x, *states = r.operands(op)
    weights = [name for name in op.reads if name in r.parameters and len(r.shape(name)) > 1]
    made = kinds.lstm(r.name(op), x, states[0] if states else None, r.shape(op.name)[-1])
    work = 2.0 * sum(prod(r.shape(name)) for name in weights) / made.sizes[-1]
    return r.make(op, replace(made, inputs=(x.name, *(state.name for state in states)), work=work))
