"""Lets devices hold the parts of parameters that they use, instead of cutting them out of the whole each time.

    fc_weight_0 = getitem(fc_weight, (0:64, :))        held: fc.weight, rows 0 to 64
    y_0 = linear(x, fc_weight_0)                       y_0 = linear(x, fc_weight_0)

For each part that is cut out, and each micro-batch, autograd makes a zero-filled gradient as large as the whole. A part
that is held has a small gradient of its own, which is added to the right region of the parameter's gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, State
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.placed_graph import Placed


def shard_parameters(placed: Placed) -> Placed:
    """The graph in which parts of parameters are states."""
    graph = placed.graph
    written = {name for op in graph.ops for name in op.writes} | {output.value for output in graph.outputs}
    paths = {state.path for state in graph.states}
    parameters = {state.name: state for state in graph.states if state.kind == "parameter" and not state.part}
    found: dict[str, State] = {}
    for op in graph.ops:
        made = _part(parameters, op)
        if made is not None and not {op.name, op.reads[0]} & written and made.held not in paths:
            found[op.name] = made
    if not found:
        return placed
    ops = tuple(op for op in graph.ops if op.name not in found)
    devices = {op.name: placed.devices[op.name] for op in ops}
    held = replace(graph, ops=ops, states=(*graph.states, *found.values()))
    return replace(placed, graph=held, devices=devices)


def _part(parameters: Mapping[str, State], op: Op) -> State | None:
    """The part of a parameter that the op cuts out, as a state; None if it does something else."""
    if op.target is not operator.getitem or not isinstance(op.args[0], Ref) or not isinstance(op.type, TensorType):
        return None
    state = parameters.get(op.args[0].name)
    if state is None or not isinstance(state.type, TensorType):
        return None
    ends = _ends(op.args[1], state.type.shape)
    return None if ends is None else State(op.name, state.path, state.kind, op.type, part=ends)


def _ends(index: Any, shape: tuple[int | str, ...]) -> tuple[tuple[int, int], ...] | None:
    """The ranges of an index that is made of plain slices, up to the last dimension that is cut; None for any other
    index."""
    items = index if isinstance(index, tuple) else (index,)
    if len(items) > len(shape) or not all(isinstance(item, slice) and item.step in (None, 1) for item in items):
        return None
    ends = []
    for item, size in zip((*items, *(slice(None),) * (len(shape) - len(items))), shape, strict=True):
        begin, end = item.start or 0, size if item.stop is None else item.stop
        if not (isinstance(begin, int) and isinstance(end, int) and isinstance(size, int) and 0 <= begin < end <= size):
            return None
        ends.append((begin, end))
    while len(ends) > 1 and ends[-1] == (0, shape[len(ends) - 1]):
        ends.pop()
    return tuple(ends)
