"""Which values may be the same memory.

Capture knows exactly what each op writes, and names every value that a later op can still see (`Op.writes`). What it
does not name is memory whose names are all dead, which matters as soon as a stage does not own it: a stage that takes x
and writes a view of it would write into what its neighbour keeps for backward. So this is the cautious answer, by name
of function: a result is fresh memory if it comes from a function of torch that is known to return fresh memory, and may
be an argument's memory otherwise. A wrong "may be" costs a copy, and only where something is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .graph import Op, called, is_opaque, refs, target_name
from .types import ScalarType, TensorType, TupleType, ValueType

# Functions and methods of torch whose result may be (part of) their first argument ...
_VIEWS = """
    T mT H mH real imag data alias adjoint as_strided as_subclass as_tensor asarray broadcast_to chunk conj contiguous
    detach diagonal dsplit expand expand_as flatten getattr getitem hsplit linalg_diagonal matrix_H moveaxis movedim
    narrow numpy_T permute positive ravel reshape reshape_as resolve_conj resolve_neg select slice slice_inverse split
    split_with_sizes squeeze swapaxes swapdims t tensor_split to transpose unbind unflatten unfold unsqueeze view
    view_as view_as_complex view_as_real vsplit
    cpu cuda type type_as double float half bfloat16 long int short char byte bool cfloat cdouble chalf
    indices values row_indices col_indices crow_indices ccol_indices coalesce to_dense pin_memory lift_fresh
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
    pad interpolate upsample fold rot90 pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
    __getitem__ __get__
"""
# ... or of any of their arguments.
_VIEWS_OF_ALL = "broadcast_tensors meshgrid einsum atleast_1d atleast_2d atleast_3d apply tuple list dict max min"
VIEWS, VIEWS_OF_ALL = frozenset(_VIEWS.split()), frozenset(_VIEWS_OF_ALL.split())
_KNOWN = ("torch", "_operator", "operator", "math", "builtins")


def known(target: Callable[..., Any] | str) -> bool:
    """Whether an op calls torch, or Python's own operators; anything else may do as it likes."""
    if isinstance(target, str):
        return True  # a method of a tensor
    owner = getattr(target, "__objclass__", None) or type(getattr(target, "__self__", None))
    module = getattr(target, "__module__", None) or owner.__module__
    return module.split(".")[0] in _KNOWN


def shares(op: Op) -> tuple[str, ...]:
    """What the op reads whose memory its result may be, in-place results aside."""
    if is_opaque(op):  # which sees to it
        return ()
    name = called(op).partition(".")[0]
    if name in VIEWS_OF_ALL or not known(op.target):
        return op.reads
    if name not in VIEWS:
        return ()
    return tuple(ref.name for ref in refs(op.args[:1])) if op.args else op.reads


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
