"""Leaves out the ops whose results nobody uses.

    mask = ones(b, 8)        nobody reads it                    is left out
    h = neg(x)               the next op alone reads it         is left out
    h_1 = add_(h, 1)         writes memory that nobody reads    is left out
    count = add_(steps, 1)   writes a buffer                    stays
    y = linear(x, weight)    an output                          stays
    _assert_async(ok)        for its effect                     stays

An op that is gone has no stage, moves nothing and draws no random number; the others keep their numbers, so they draw
what they would have drawn.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph, Op, target_name
from .shared_memory_values import known
from .value_types import ObjectType


def without_dead_ops(graph: Graph) -> Graph:
    """The graph without ops that have no part in its outputs, in its states, or in anything else one could see, and
    without states that then nobody uses; the same object if there are none."""
    outputs = {output.value for output in graph.outputs}
    read = set(outputs)
    seen = outputs | {state.name for state in graph.states}  # where a write is not lost
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.name in read or _has_effects(op) or not seen.isdisjoint(op.writes):
            kept.append(op)
            read.update(op.reads, op.writes)
            seen.update(op.reads)
    if len(kept) == len(graph.ops):
        return graph
    states = tuple(state for state in graph.states if state.name in read)
    return replace(graph, ops=tuple(reversed(kept)), states=states)


def _has_effects(op: Op) -> bool:
    """Whether the op may do more than give a result and write what it says. Of functions that are not torch's own,
    nobody knows."""
    if target_name(op.target) == "_log_api_usage_once":  # torch counts for itself who uses what
        return False
    module = getattr(op.target, "__module__", None) or ""
    registered = module.startswith(("torch._ops.", "torch.ops.", "torch._library.")) and module != "torch._ops.aten"
    checks = "assert" in target_name(op.target) or isinstance(op.type, ObjectType)
    return checks or registered or not known(op.target)
