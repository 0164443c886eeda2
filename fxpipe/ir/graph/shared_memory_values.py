"""Which values may be the same memory.

Capture knows exactly what each op writes, and `Op.writes` names every written value that a later op can still see. It
does not name memory that no later op reads. This matters if the memory belongs to another stage: a stage that takes x
and writes a view of x would write into what its neighbour keeps for backward. So this module answers cautiously, by the
name of the function: a result is fresh memory if torch's function is known to return fresh memory; otherwise it may be
an argument's memory. A wrong "may be" costs a copy, and only where something is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fxpipe.ir.once import once

from .graph import Graph, Op, Ref, called, is_opaque, op_name, refs, target_name
from .ops import CASTS, DROPOUTS, MERE_VIEWS, VIEWS
from .value_types import ScalarType, TensorType, TupleType, ValueType

# Other functions of torch that may return the memory of their first argument, or compute and keep values of it; ...
_AT_TIMES = """
    indices values row_indices col_indices crow_indices ccol_indices coalesce to_dense pin_memory lift_fresh
    pad interpolate upsample fold rot90 pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
"""
# ... or the memory of any of their arguments.
_OF_ALL = "broadcast_tensors meshgrid einsum atleast_1d atleast_2d atleast_3d apply tuple list dict max min"
MAY_VIEW, MAY_VIEW_ALL = MERE_VIEWS | DROPOUTS | frozenset(_AT_TIMES.split()), frozenset(_OF_ALL.split())
_KNOWN = ("torch", "_operator", "operator", "math", "builtins")


def known(target: Callable[..., Any] | str) -> bool:
    """Whether an op calls torch, or Python's own operators; nothing is known about other functions."""
    if isinstance(target, str):
        return True  # a method of a tensor
    owner = getattr(target, "__objclass__", None) or type(getattr(target, "__self__", None))
    module = getattr(target, "__module__", None) or owner.__module__
    return module.split(".")[0] in _KNOWN


@once
def shares(op: Op) -> tuple[str, ...]:
    """The values read by the op whose memory its result may be; results of in-place ops are not considered."""
    if is_opaque(op):  # it clones such results
        return ()
    name = called(op).partition(".")[0]
    if name in MAY_VIEW_ALL or not known(op.target):
        return op.reads
    if name not in MAY_VIEW:
        return ()
    return tuple(ref.name for ref in refs(op.args[:1])) if op.args else op.reads


def viewed(op: Op, types: Mapping[str, ValueType]) -> str | None:
    """The value that the op's result is a view of, as far as the types tell, or None. At run time it may still be a
    copy, if the memory layout requires one."""
    name = op_name(op)
    if name not in VIEWS and name not in CASTS and name not in DROPOUTS:
        return None
    first = next((arg for arg in op.args if isinstance(arg, Ref)), None)
    if first is None or is_opaque(op) or not known(op.target):
        return None
    kind = types[first.name]
    if name == "getitem":
        looked_up = any(isinstance(types[ref.name], TensorType) for ref in refs(op.args[1:]))
        return None if looked_up and isinstance(kind, TensorType) else first.name
    if name == "unfold" and not isinstance(op.target, str):  # torch.nn.functional's makes columns of an image
        return None
    idle = (name in CASTS and kind == op.type) or (name in DROPOUTS and not trains(op))
    return first.name if name in VIEWS or idle else None


def trains(dropout: Op) -> bool:
    """Whether a dropout is active: its third argument, `training`, True if not given."""
    return bool(dropout.args[2] if len(dropout.args) > 2 else dropout.kwargs.get("training", True))


def memory(ops: Iterable[Op], types: Mapping[str, ValueType]) -> Callable[[str], str]:
    """A function that gives the same name for all names that may be the same memory."""
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        path = []
        while name in parents:
            path.append(name)
            name = parents[name]
        parents.update((step, name) for step in path)
        return name

    for op in ops:
        if isinstance(op.type, ScalarType):
            continue
        written = (name for name in op.writes if is_in_place(op, types[name]))
        for name in (*shares(op), *written):
            one, other = root(op.name), root(name)
            if one != other and not isinstance(types[name], ScalarType):
                parents[one] = other
    return root


@once
def memory_of(graph: Graph) -> Mapping[str, str]:
    """For every name of the graph, one name for all that may be the same memory."""
    root = memory(graph.ops, graph.types)
    return {name: root(name) for name in graph.types}


def is_in_place(op: Op, written: ValueType) -> bool:
    """Whether the op returns what it writes, as `x.add_(1)` does, and batch norm with its running mean does not."""
    if is_opaque(op):
        return False
    name = target_name(op.target)
    return (name.endswith("_") and not name.endswith("__")) or _same(op.type, written)


def _same(one: ValueType, other: ValueType) -> bool:
    if isinstance(one, TupleType):
        return any(_same(item, other) for item in one.items)
    if isinstance(one, TensorType) and isinstance(other, TensorType):
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    return not isinstance(one, TensorType)
