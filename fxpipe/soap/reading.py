"""A captured model as an operator graph. The graph has ops as torch has them, down to each view and activation; a
strategy is about the few that cost something, so here

- an op of a known kind becomes an operator, with the sizes that its tensors have for the given batch;
- an activation, a cast, a dropout belongs to the operator whose output it changes;
- views are followed (`axes.py`) and belong to it too, unless an op reads what no operator put out;
- what depends on no sample (a table of positions, a scale) counts as weights of the operator that reads it.

    graph                                        operators
      h = conv2d(image, weight, bias)              conv   conv2d
      x = relu(h)
      flat = x.flatten(1)                          flat   flatten
      y = linear(flat, weight_1, bias_1)           fc     linear
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.axes import Axes, axis, permuted, reshaped, whole
from fxpipe.ir.families import CELLS, LIKE, LOSSES, PERMUTATIONS, PIECES, POINTWISE, VIEWS
from fxpipe.ir.graph import Graph, Op, Ref, op_name, refs, show_op
from fxpipe.ir.operators import KINDS, Dimension, Operator
from fxpipe.ir.reading import Reading, View
from fxpipe.ir.types import ITEMSIZE, TensorType, dim_size, tensors

from . import kinds
from .draft import Draft

# Whatever else is done to each sample by itself.
ALONE = {
    "adaptive_avg_pool1d", "amax", "amin", "argmax", "conv_transpose1d", "conv_transpose2d", "cumsum", "expand",
    "flip", "group_norm", "instance_norm", "interpolate", "log_softmax", "matmul", "mean", "normalize", "pad",
    "repeat", "rms_norm", "roll", "select", "softmax", "stack", "sum",
}  # fmt: skip
NAMES: dict[int, tuple[str, ...]] = {2: ("channel",), 3: ("length", "channel"), 4: ("channel", "height", "width")}


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the samples: a view of what an operator puts out. `name` is the op that it is of."""

    operator: Operator
    axes: Axes
    name: str


@dataclass(frozen=True)
class Held:
    """A tensor that does not depend on the samples, and the parameters that it is made of."""

    states: tuple[str, ...] = ()


def read(graph: Graph, sizes: Mapping[str, int]) -> Reading:
    """The operators of a graph, with a number for each of its sizes. Raises PlanError, with the op and the user's line,
    where an op is of no known kind, or the samples are not in its first dimension."""
    reader = _Reader(graph, sizes)
    for op in graph.ops:
        reader.read(op)
    operators = reader.draft.graph(graph.model, reader.element)
    views = reader.seen()
    ops: dict[str, list[str]] = {operator.name: [] for operator in operators}
    for name, view in views.items():
        ops[view.operator].append(name)
    return Reading(operators, {name: tuple(members) for name, members in ops.items()}, views)


class _Reader:
    """What is known while the ops are read one after the other."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.draft, self.sizes = Draft(), sizes
        self.values: dict[str, Value | Held] = {}
        self.types = graph.types
        self.ops: dict[str, Value] = {}  # what each op puts out
        self.pieces: dict[str, Value] = {}  # what was taken apart, by the op that did so
        self.views: dict[tuple[str, Axes], Operator] = {}  # what was made of an operator for others to read
        self.names: dict[str, int] = {}
        self.parameters = {state.name: state.path for state in graph.states if state.kind == "parameter"}
        self.element = max(
            (ITEMSIZE[t.dtype] for name in self.parameters for t in tensors(self.types[name])), default=4
        )
        for state in graph.states:
            self.values[state.name] = Held((state.name,) if state.name in self.parameters else ())
        for item in graph.inputs:
            if isinstance(item.type, TensorType):
                self.values[item.name] = Held() if item.batch_dim is None else self.fed(item.name, item.type)
        self.batch = next((v.operator.sizes[0] for v in self.values.values() if isinstance(v, Value)), 1)

    # what is asked of an op ----------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        type = next(tensors(self.types[name]))
        return tuple(dim_size(dim, self.sizes) for dim in type.shape)

    def known(self, arg: Any) -> Iterator[Value | Held]:
        """The tensors in an argument."""
        for ref in refs(arg):
            if ref.name in self.values:
                yield self.values[ref.name]

    def read(self, op: Op) -> None:
        """Finds what the op's result is a view of, or makes an operator for it."""
        if not any(True for _ in tensors(op.type)):
            return  # a number, or nothing
        reads = list(self.known((op.args, dict(op.kwargs))))
        if op_name(op) in LIKE or not any(isinstance(value, Value) for value in reads):
            held = dict.fromkeys(name for value in reads if isinstance(value, Held) for name in value.states)
            self.values[op.name] = Held(tuple(held))
            return
        if op_name(op) in PIECES:
            self.pieces[op.name] = self.values[op.name] = self.first(op)
            return
        value = self.rule(op)(self, op)
        self.values[op.name] = self.ops[op.name] = replace(value, name=op.name)

    def rule(self, op: Op) -> Callable[[_Reader, Op], Value]:
        name = op_name(op)
        if name in RULES:
            return RULES[name]
        steps = "; write out its steps, with nn.LSTMCell or nn.GRUCell" if name in ("lstm", "gru") else ""
        known = ", ".join(sorted(KINDS - {"input"}))
        raise self.refuse(op, f"{name!r} is no operator whose parts are known{steps}; the kinds are {known}")

    def refuse(self, op: Op, why: str) -> PlanError:
        return PlanError(f"{show_op(op)}: {why}")

    def seen(self) -> dict[str, View]:
        """What each op puts out. A view that others read is of the operator that was made for them, but for the op
        that an operator was made for."""
        made, found = {name for name, value in self.values.items() if name not in self.ops}, dict[str, View]()
        for name, value in self.ops.items():
            operator = value.operator.name
            view = self.views.get((operator, value.axes)) if operator in made else None
            found[name] = View(view.name, whole(view.sizes)) if view else View(operator, value.axes)
            made.add(operator)
        return found

    # operators -----------------------------------------------------------------------------------

    def fed(self, name: str, type: TensorType) -> Value:
        """An operator for what is fed in."""
        shape = tuple(dim_size(dim, self.sizes) for dim in type.shape)
        named = zip(("length",), shape[1:], strict=True) if _words(type) else self.dimensions(shape)
        output = (Dimension("sample", shape[0], "S"), *(Dimension(n, s) for n, s in named))
        return self.new(Operator(name, "input", (), output))

    def dimensions(self, shape: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Names for all dimensions but the first."""
        names = NAMES.get(len(shape)) or tuple(f"dimension {dim}" for dim in range(1, len(shape)))
        return zip(names, shape[1:], strict=True)

    def new(self, operator: Operator) -> Value:
        """Keeps an operator, under a name that no other has."""
        count = self.names.get(operator.name, 0)
        self.names[operator.name] = count + 1
        named = replace(operator, name=f"{operator.name}.{count}") if count else operator
        self.draft(named)
        return Value(named, whole(named.sizes), named.name)

    def make(self, op: Op, operator: Operator, shape: Sequence[int] = ()) -> Value:
        """The operator of an op, with the sizes and weights that the op has; `shape` is the op's if not given."""
        named = zip(operator.output, shape or self.shape(op.name), strict=True)
        dimensions = tuple(replace(dimension, size=size) for dimension, size in named)
        states = list(self.known((op.args, dict(op.kwargs))))
        held = tuple(dict.fromkeys(name for value in states if isinstance(value, Held) for name in value.states))
        return self.new(
            replace(
                operator,
                output=dimensions,
                weights=sum(prod(self.shape(name)) for name in held),
                shared=", ".join(sorted({self.parameters[name].rpartition(".")[0] or name for name in held})),
            )
        )

    def name(self, op: Op) -> str:
        """The module that the op is of; its own name if it is of none."""
        return op.origin.module or op.name

    def whole(self, op: Op, value: Value | Held) -> Operator:
        """An operator that puts out just this value, for `op` to read."""
        if isinstance(value, Held):
            raise self.refuse(op, "it reads, in place of a tensor of the samples, one that does not depend on them")
        operator, axes = value.operator, value.axes
        if axes == whole(operator.sizes) and len(axes) == len(operator.sizes):
            return operator
        if (operator.name, axes) not in self.views:
            shape = self.shape(value.name)
            if not shape or axes[:1] != (axis(0, operator.sizes[0]),):
                raise self.refuse(op, f"of {value.name}, the first dimension is not that of the samples")
            flat = len(shape) == 2 and reshaped(whole(operator.sizes), shape) == axes and len(operator.sizes) > 2
            made = kinds.flatten(value.name, operator) if flat else self.alone(value.name, (operator,), shape)
            self.views[operator.name, axes] = self.new(made).operator
        return self.views[operator.name, axes]

    def alone(self, name: str, xs: tuple[Operator, ...], shape: Sequence[int], work: float = 0.0) -> Operator:
        output = (Dimension("sample", shape[0]), *(Dimension(n, s) for n, s in self.dimensions(shape)))
        return kinds.samplewise(name, xs, output, work)

    def operands(self, op: Op) -> tuple[Operator, ...]:
        """What the op reads of the samples, each once."""
        values = (v for v in self.known((op.args, dict(op.kwargs))) if isinstance(v, Value))
        return tuple({(found := self.whole(op, value)).name: found for value in values}.values())

    def first(self, op: Op) -> Value:
        found = next(self.known((op.args, dict(op.kwargs))))
        if isinstance(found, Held):
            raise self.refuse(op, "it reads, in place of a tensor of the samples, one that does not depend on them")
        return found

    def lasts(self, value: Value) -> bool:
        """Whether the last dimension is that of the operator, whole."""
        return bool(value.axes) and value.axes[-1] == axis(len(value.operator.sizes) - 1, value.operator.sizes[-1])


def _words(type: TensorType) -> bool:
    """Whether these look like sequences of numbers of words."""
    return type.dtype in ("i64", "i32") and len(type.shape) == 2


def argument(op: Op, index: int, name: str, default: Any = None) -> Any:
    """An argument, wherever it stands."""
    return op.args[index] if len(op.args) > index else op.kwargs.get(name, default)


def _pair(number: Any, rank: int) -> tuple[int, ...]:
    return tuple(number) if isinstance(number, (tuple, list)) else (number,) * rank


# What is done for each kind of op -------------------------------------------------------------------------------------


def _pointwise(r: _Reader, op: Op) -> Value:
    """Part of the operator whose output it changes, unless it reads two of them, or weights."""
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


def _permuted(r: _Reader, op: Op) -> Value:
    value, dims = r.first(op), [*op.args[1:], *(v for k, v in op.kwargs.items() if k != "input")]
    order = list(range(len(value.axes)))
    if op_name(op) == "permute":
        order = [int(dim) % len(order) for dim in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    else:
        a, b = (int(dim) % len(order) for dim in dims or (0, 1))
        order[a], order[b] = order[b], order[a]
    return replace(value, axes=permuted(value.axes, order))


def _viewed(r: _Reader, op: Op) -> Value:
    """Another shape of as many elements; or a piece, which is fed in if what it is a piece of is."""
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


def _alone(r: _Reader, op: Op) -> Value:
    """Whatever is done to each sample by itself; the sum over all samples is a loss."""
    shape = r.shape(op.name)
    if not shape:
        return _loss(r, op)
    xs = r.operands(op)
    if shape[0] != xs[0].sizes[0]:
        raise r.refuse(op, "the first dimension of its result is not that of the samples")
    work = max(x.elements for x in xs) / prod(shape)
    return r.make(op, r.alone(r.name(op), xs, shape, work))


def _loss(r: _Reader, op: Op) -> Value:
    """A number over the samples, or one for each. It stays one for each as far as the operator knows."""
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


def _linear(r: _Reader, op: Op) -> Value:
    """Over the last dimension; views of the others are followed."""
    x = r.first(op)
    if not r.lasts(x):
        x = Value(operator := r.whole(op, x), whole(operator.sizes), x.name)
    channel = r.shape(op.name)[-1]
    sizes = (*x.operator.sizes[:-1], channel)
    made = r.make(op, kinds.linear(r.name(op), x.operator, channel), sizes)
    return replace(made, axes=(*x.axes[:-1], axis(len(sizes) - 1, channel)))


def _matmul(r: _Reader, op: Op) -> Value:
    a, b = (r.values[ref.name] for ref in refs((op.args, dict(op.kwargs))) if ref.name in r.values)
    if isinstance(a, Value) and isinstance(b, Held):
        return _linear(r, op)
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return _alone(r, op)
    x, y = r.whole(op, a), r.whole(op, b)
    if len(x.sizes) == len(y.sizes) > 2 and x.sizes[:-2] == y.sizes[:-2]:
        return r.make(op, kinds.matmul(r.name(op), x, y))
    return r.make(op, r.alone(r.name(op), (x, y), r.shape(op.name), 2.0 * x.sizes[-1]))


def _embedding(r: _Reader, op: Op) -> Value:
    tokens = next(value for value in r.known((op.args, dict(op.kwargs))) if isinstance(value, Value))
    return r.make(op, kinds.embedding(r.name(op), r.whole(op, tokens), 1, r.shape(op.name)[-1]))


def _conv(r: _Reader, op: Op) -> Value:
    x, weight = r.whole(op, r.first(op)), r.shape(argument(op, 1, "weight").name)
    rank = len(weight) - 2
    stride = _pair(argument(op, 3, "stride", 1), rank)
    dilation = _pair(argument(op, 5, "dilation", 1), rank)
    window = tuple((size - 1) * d + 1 for size, d in zip(weight[2:], dilation, strict=True))
    padding = argument(op, 4, "padding", 0)
    sides = {"same": tuple((w - 1) // 2 for w in window), "valid": (0,) * rank}
    given = sides[padding] if isinstance(padding, str) else _pair(padding, rank)
    if rank == 1:
        made = kinds.conv1d(r.name(op), x, weight[0], window[0], stride[0], given[0])
    elif rank == 2:
        (w, v), (s, t), (p, q) = window, stride, given
        made = kinds.conv2d(r.name(op), x, weight[0], (w, v), (s, t), (p, q))
    else:
        raise r.refuse(op, "convolutions have one or two dimensions")
    return r.make(op, replace(made, work=2.0 * prod(weight[1:])))


def _pool(r: _Reader, op: Op) -> Value:
    x = r.whole(op, r.first(op))
    rank = len(x.sizes) - 2
    if op_name(op).startswith("adaptive"):
        sizes = list(zip(x.sizes[2:], r.shape(op.name)[2:], strict=True))
        if any(size % left for size, left in sizes):
            return _alone(r, op)
        window = tuple(size // left for size, left in sizes)
        stride, padding = window, (0,) * rank
    else:
        window = _pair(argument(op, 1, "kernel_size"), rank)
        stride = _pair(argument(op, 2, "stride") or window, rank)
        padding = _pair(argument(op, 3, "padding", 0), rank)
    if rank == 1:
        return r.make(op, kinds.pool1d(r.name(op), x, window[0], stride[0], padding[0]))
    (w, v), (s, t), (p, q) = window, stride, padding
    return r.make(op, kinds.pool2d(r.name(op), x, (w, v), (s, t), (p, q)))


def _batch_norm(r: _Reader, op: Op) -> Value:
    return r.make(op, kinds.batch_norm(r.name(op), r.whole(op, r.first(op))))


def _layer_norm(r: _Reader, op: Op) -> Value:
    if len(argument(op, 1, "normalized_shape")) > 1:
        return _alone(r, op)
    return r.make(op, kinds.layer_norm(r.name(op), r.whole(op, r.first(op))))


def _softmax(r: _Reader, op: Op) -> Value:
    x = r.whole(op, r.first(op))
    dim = argument(op, 1, "dim")
    last = dim is not None and dim % len(x.sizes) == len(x.sizes) - 1
    return r.make(op, kinds.softmax(r.name(op), x)) if last else _alone(r, op)


def _cell(r: _Reader, op: Op) -> Value:
    """A step of a recurrent layer: its input, and the state if that is not all zeros."""
    x, *states = r.operands(op)
    weights = [name for name in op.reads if name in r.parameters and len(r.shape(name)) > 1]
    made = kinds.lstm(r.name(op), x, states[0] if states else None, r.shape(op.name)[-1])
    work = 2.0 * sum(prod(r.shape(name)) for name in weights) / made.sizes[-1]
    return r.make(op, replace(made, inputs=(x.name, *(state.name for state in states)), work=work))


def _attention(r: _Reader, op: Op) -> Value:
    """Heads that are channels of (sample, length, channel) taken apart stay so, and are cut as channels."""
    values = [value for value in map(r.values.get, (ref.name for ref in refs(op.args[:3]))) if isinstance(value, Value)]
    if len(values) == 3 and all(_heads(value) for value in values):
        query, key, value = values
        heads = r.shape(op.name)[1]
        made = kinds.scaled_dot_product(r.name(op), query.operator, key.operator, value.operator, heads)
        return replace(r.make(op, made, query.operator.sizes), axes=query.axes)
    xs = r.operands(op)
    return r.make(op, r.alone(r.name(op), xs, r.shape(op.name), 4.0 * xs[min(1, len(xs) - 1)].sizes[-2]))


def _multi_head(r: _Reader, op: Op) -> Value:
    """All of nn.MultiheadAttention, which has the samples in its second dimension: linear layers for queries, keys and
    values, attention, and a linear layer for the result."""
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
    """(length, sample, channel) of (sample, length, channel); of no other there is one."""
    return permuted(whole(operator.sizes), (1, 0, 2)) if len(operator.sizes) == 3 else ()


def _heads(value: Value) -> bool:
    """Whether this is (sample, head, length, channel of the head) of an operator's (sample, length, channel)."""
    sizes = value.operator.sizes
    return (
        len(sizes) == 3 and len(value.axes) == 4 and reshaped(permuted(value.axes, (0, 2, 1, 3)), sizes) == whole(sizes)
    )


def _concat(r: _Reader, op: Op) -> Value:
    values = list(r.known(argument(op, 0, "tensors")))
    xs = tuple(r.whole(op, value) for value in values if isinstance(value, Value))
    dim = argument(op, 1, "dim", 0) % len(xs[0].sizes)
    if dim == 0:
        raise r.refuse(op, "it puts samples together")
    if len(xs) < len(values):
        return _alone(r, op)
    return r.make(op, kinds.concat(r.name(op), xs, dim))


RULES: dict[str, Callable[[_Reader, Op], Value]] = {
    **dict.fromkeys(ALONE, _alone),
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(PERMUTATIONS, _permuted),
    **dict.fromkeys(VIEWS, _viewed),
    **dict.fromkeys(CELLS, _cell),
    **dict.fromkeys(LOSSES, _loss),
    **dict.fromkeys(("conv1d", "conv2d"), _conv),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "fn"), _pool),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("cat", "concat"), _concat),
    "linear": _linear,
    "embedding": _embedding,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head,
}
