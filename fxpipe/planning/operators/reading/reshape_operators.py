"""Operators for ops that change only the form of what they read, or compute each sample by itself: activations, views,
sums, concatenations."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import LOSSES
from fxpipe.ir.graph.value_types import TensorType, tensors
from fxpipe.ir.operators.tensor_axes import axis, permuted, reshaped
from fxpipe.planning.operators.models import operator_kinds as kinds

from .operator_reader import Held, Reader, Value


def pointwise(r: Reader, op: Op) -> Value:
    """An activation belongs to the operator whose output it reads, unless it reads two operators, or weights."""
    reads = list(r.known((op.args, dict(op.kwargs))))
    values = [value for value in reads if isinstance(value, Value)]
    weights = any(value.states for value in reads if isinstance(value, Held))
    widest = max(values, key=lambda value: prod(r.shape(value.name)))
    others = {value.operator.name for value in values if r.shape(value.name)} - {widest.operator.name}
    if not others and not weights and r.shape(op.name) == r.shape(widest.name):
        return widest
    same = {(value.axes, value.operator.sizes) for value in values} == {(widest.axes, widest.operator.sizes)}
    if same:
        xs = tuple({value.operator.name: value.operator for value in values}.values())
        made = r.make(op, kinds.elementwise(r.name(op), *xs), widest.operator.sizes)
        return replace(made, axes=widest.axes)
    return r.make(op, kinds.elementwise(r.name(op), *r.operands(op)))


def permutation(r: Reader, op: Op) -> Value:
    """The dimensions in another order."""
    value, dims = r.first(op), [*op.args[1:], *(v for k, v in op.kwargs.items() if k != "input")]
    order = list(range(len(value.axes)))
    if op_name(op) == "permute":
        order = [int(dim) % len(order) for dim in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    else:
        a, b = (int(dim) % len(order) for dim in dims or (0, 1))
        order[a], order[b] = order[b], order[a]
    return replace(value, axes=permuted(value.axes, order))


def view(r: Reader, op: Op) -> Value:
    """Another shape of as many elements, or a piece; a piece of what is fed in is fed in, too."""
    source = op.args[0].name if isinstance(op.args[0], Ref) else ""
    value = r.pieces.get(source) or r.first(op)
    if source not in r.pieces and not isinstance(r.types[source], TensorType):
        return value  # one of the results of an operator
    shape = r.shape(op.name)
    if source not in r.pieces and prod(shape) == prod(r.shape(value.name)):
        axes = reshaped(value.axes, shape)
        return r.new(r.alone(op.name, (r.whole(op, value),), shape)) if axes is None else replace(value, axes=axes)
    if not shape or shape[0] != r.batch:
        raise r.refuse(op, "it takes some of the samples")
    if value.operator.kind == "input":
        return r.fed(op.name, next(tensors(op.type)))
    return r.new(r.alone(op.name, (value.operator,), shape))


def alone(r: Reader, op: Op) -> Value:
    """An operator that computes each sample by itself; a number over all samples is a loss."""
    shape = r.shape(op.name)
    if not shape:
        return loss(r, op)
    xs = r.operands(op)
    if shape[0] != xs[0].sizes[0]:
        raise r.refuse(op, "the first dimension of its result is not that of the samples")
    work = max(x.elements for x in xs) / prod(shape)
    return r.make(op, r.alone(r.name(op), xs, shape, work))


def loss(r: Reader, op: Op) -> Value:
    """A loss: a number over the samples, or one for each. The operator's output has one for each in both cases."""
    value = r.first(op)
    if not value.axes:
        return value  # of a number already
    label = 1 if op_name(op) in LOSSES and len(value.axes) > 1 else len(value.axes) - 1
    last = len(value.operator.sizes) - 1
    direct = last > 0 and value.axes[label] == axis(last, value.operator.sizes[last])
    x = value.operator if direct else r.whole(op, value)
    one = kinds.loss(r.name(op), x) if len(x.sizes) > 1 else kinds.elementwise(r.name(op), x)
    made = r.make(op, one, one.sizes)
    return replace(made, axes=()) if not r.shape(op.name) else made


def concat(r: Reader, op: Op) -> Value:
    """A concatenation in any dimension but that of the samples."""
    values = list(r.known(argument(op, 0, "tensors")))
    xs = tuple(r.whole(op, value) for value in values if isinstance(value, Value))
    dim = argument(op, 1, "dim", 0) % len(xs[0].sizes)
    if dim == 0:
        raise r.refuse(op, "it puts samples together")
    if len(xs) < len(values):
        return alone(r, op)
    return r.make(op, kinds.concat(r.name(op), xs, dim))
