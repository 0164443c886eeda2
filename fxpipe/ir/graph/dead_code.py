"""Removes the ops whose results are not used.

    mask = ones(b, 8)        no op reads it                     removed
    h = neg(x)               only the next op reads it          removed
    h_1 = add_(h, 1)         writes memory that no op reads     removed
    count = add_(steps, 1)   writes a buffer                    stays
    y = linear(x, weight)    an output                          stays
    _assert_async(ok)        has an effect                      stays
    enter vmap, leave vmap   no op is left between them         removed

The random ops that stay keep their `draw` numbers, so they draw the same random numbers as before.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph, Op, called, target_name
from .legal_cuts import ENTER_VMAP, LEAVE_VMAP
from .shared_memory_values import known
from .value_types import IN_VMAP, ObjectType


def without_dead_ops(graph: Graph) -> Graph:
    """The graph without the ops that affect no output, no state and nothing else outside, and without the states that
    no remaining op uses; the same object if there are no such ops."""
    outputs = {output.value for output in graph.outputs}
    read = set(outputs)
    seen = outputs | {state.name for state in graph.states}  # a write to one of these is seen later
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if called(op) == ENTER_VMAP and kept and called(kept[-1]) == LEAVE_VMAP:
            kept.pop()
        elif op.name in read or _has_effects(op) or not seen.isdisjoint(op.writes):
            kept.append(op)
            read.update(op.reads, op.writes)
            seen.update(op.reads)
    if len(kept) == len(graph.ops):
        return graph
    states = tuple(state for state in graph.states if state.name in read)
    return replace(graph, ops=tuple(reversed(kept)), states=states)


def _has_effects(op: Op) -> bool:
    """Whether the op may do more than return a result and write `op.writes`. Functions that are not torch's own may."""
    if target_name(op.target) == "_log_api_usage_once":  # usage statistics of torch
        return False
    module = getattr(op.target, "__module__", None) or ""
    registered = module.startswith(("torch._ops.", "torch.ops.", "torch._library.")) and module != "torch._ops.aten"
    checks = "assert" in target_name(op.target) or (isinstance(op.type, ObjectType) and op.type != IN_VMAP)
    return checks or registered or not known(op.target)
