"""A captured model as an operator graph. The captured graph has all ops, down to each view and activation; a strategy
needs only the few that cost something, so here

- an op of a known kind becomes an operator, with the sizes that its tensors have for the given batch;
- an activation, a cast, a dropout belongs to the operator whose output it changes;
- views are followed (`tensor_axes.py`) and belong to it too, unless an op reads one that is not an operator's output;
- what depends on no sample (a table of positions, a scale) counts as weights of the operator that reads it.

    graph                                        operators
      h = conv2d(image, weight, bias)              conv   conv2d
      x = relu(h)
      flat = x.flatten(1)                          flat   flatten
      y = linear(flat, weight_1, bias_1)           fc     linear
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fxpipe.ir.graph.graph import Graph, Op, op_name
from fxpipe.ir.graph.ops import (
    CELLS,
    CHANNEL_DROPOUTS,
    CONCATENATIONS,
    LIKE,
    LOSSES,
    PER_SAMPLE,
    PERMUTATIONS,
    POINTWISE,
    RESHAPES,
    SPLIT_OPS,
)
from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.operators.operator_map import Reading, View
from fxpipe.ir.operators.operators import KINDS
from fxpipe.ir.operators.tensor_axes import whole

from . import attention_operators as attending
from . import layer_operators as layers
from . import reshape_operators as reshaping
from .operator_reader import Held, Reader, Value

# Other ops that compute each sample by itself.
ALONE = PER_SAMPLE | {"adaptive_avg_pool1d", "expand"}


def read(graph: Graph, sizes: Mapping[str, int]) -> Reading:
    """The operators of a graph; `sizes` gives a number for each of its symbolic sizes. Raises PlanError, with the op
    and the user's line, if an op is of no known kind, or the samples are not in its first dimension."""
    reader = Reader(graph, sizes)
    for op in graph.ops:
        _read(reader, op)
    operators = reader.draft.graph(graph.model, reader.element, reader.dtype or "f32")
    views = _seen(reader)
    ops: dict[str, list[str]] = {operator.name: [] for operator in operators}
    for name, view in views.items():
        ops[view.operator].append(name)
    return Reading(operators, {name: tuple(members) for name, members in ops.items()}, views)


def _read(r: Reader, op: Op) -> None:
    """Find the operator that the op's result is a view of, or make one for it."""
    if not any(True for _ in tensors(op.type)):
        return  # a number, or nothing
    reads = list(r.known((op.args, dict(op.kwargs))))
    if op_name(op) in LIKE or not any(isinstance(value, Value) for value in reads):
        held = dict.fromkeys(name for value in reads if isinstance(value, Held) for name in value.states)
        r.values[op.name] = Held(tuple(held))
        return
    if op_name(op) in SPLIT_OPS:
        r.pieces[op.name] = r.values[op.name] = r.first(op)
        return
    value = _rule(r, op)(r, op)
    r.values[op.name] = r.ops[op.name] = replace(value, name=op.name)


def _rule(r: Reader, op: Op) -> Callable[[Reader, Op], Value]:
    name = op_name(op)
    if name in RULES:
        return RULES[name]
    steps = "; write out its steps, with nn.LSTMCell or nn.GRUCell" if name in ("lstm", "gru") else ""
    known = ", ".join(sorted(KINDS - {"input"}))
    raise r.refuse(op, f"{name!r} is no operator whose parts are known{steps}; the kinds are {known}")


def _seen(r: Reader) -> dict[str, View]:
    """The output of each op as a view. If an operator was made for a view that ops read, the view is that operator's
    output, unless the op is the one for which the viewed operator was made."""
    made, found = {name for name, value in r.values.items() if name not in r.ops}, dict[str, View]()
    for name, value in r.ops.items():
        operator = value.operator.name
        view = r.views.get((operator, value.axes)) if operator in made else None
        found[name] = View(view.name, whole(view.sizes)) if view else View(operator, value.axes)
        made.add(operator)
    return found


RULES: dict[str, Callable[[Reader, Op], Value]] = {
    **dict.fromkeys(ALONE, reshaping.alone),
    **dict.fromkeys(POINTWISE | CHANNEL_DROPOUTS, reshaping.pointwise),
    **dict.fromkeys(PERMUTATIONS, reshaping.permutation),
    **dict.fromkeys((*RESHAPES, "getitem", "narrow"), reshaping.view),
    **dict.fromkeys(CELLS, layers.cell),
    **dict.fromkeys(LOSSES, reshaping.loss),
    **dict.fromkeys(("conv1d", "conv2d"), layers.conv),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "fn"), layers.pool),
    **dict.fromkeys(("matmul", "bmm"), layers.matmul),
    **dict.fromkeys(("softmax", "log_softmax"), layers.softmax),
    **dict.fromkeys(CONCATENATIONS, reshaping.concat),
    "linear": layers.linear,
    "embedding": layers.embedding,
    "batch_norm": layers.batch_norm,
    "layer_norm": layers.layer_norm,
    "scaled_dot_product_attention": attending.attention,
    "multi_head_attention_forward": attending.multi_head,
}
