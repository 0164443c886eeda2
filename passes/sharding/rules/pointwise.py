"""Elementwise ops: a part reads its own region of every operand, or all of a dimension that broadcasts. In-place ops
become ops with a new result: no other op shares the memory of a part.

Ops on each sample by itself: a part has some of the samples, and all of every other dimension.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref, map_refs, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import CHANNEL_DROPOUTS, LIKE, OVER_DIMS, PER_SAMPLE, POINTWISE
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Places, full
from fxpipe.passes.sharding.sharding_rule import Called, Rule, aligned, each, every

AUGMENTED = {
    operator.iadd: operator.add,
    operator.imul: operator.mul,
    operator.isub: operator.sub,
    operator.itruediv: operator.truediv,
}


def functional(op: Op) -> Called:
    """The op without its in-place effect: target and arguments."""
    args, kwargs = op.args, {key: value for key, value in op.kwargs.items() if key != "inplace"}
    if isinstance(op.target, str):
        return op.target if op.target.startswith("__") else op.target.rstrip("_"), args, kwargs
    if op.target in AUGMENTED:
        return AUGMENTED[op.target], args, kwargs
    if op.target.__name__.endswith("_"):
        name = op_name(op)
        return getattr(torch, name, None) or getattr(F, name), args, kwargs
    at = _place_of_inplace(op.target)
    return op.target, tuple(False if index == at else arg for index, arg in enumerate(args)), kwargs


def _place_of_inplace(target: Callable[..., Any]) -> int:
    try:
        return list(inspect.signature(target).parameters).index("inplace")
    except ValueError:  # no such argument, or a function of C++
        return -1


def _make(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    target, args, kwargs = functional(op) if op.writes else (op.target, op.args, dict(op.kwargs))
    shape = b.shape(op.name)

    def call(region: Region, device: int) -> Called:
        def value(ref: Ref) -> Any:
            if ref.name in b.numbers:
                return b.numbers[ref.name]
            alike = b.is_tensor(ref) and _repeats(b.shape(ref.name), shape)
            return b.read(op, ref, aligned(region, b.shape(ref.name)) if alike else None, device)

        return target, *map_refs((args, kwargs), value)

    parts = each(b, op, places, call)
    return _cast(b, op, parts) if op.writes else parts


def _repeats(operand: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an operand broadcasts to this shape; an operand that only gives its dtype need not."""
    pairs = zip(reversed(operand), reversed(shape), strict=False)
    return len(operand) <= len(shape) and all(size in (1, whole) for size, whole in pairs)


def _cast(b: GraphRewriter, op: Op, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts, cast to the dtype of the tensor that the op writes in place."""
    types = [b.captured[ref.name] for ref in refs((op.args, dict(op.kwargs)))]
    if len({type.dtype for type in types if isinstance(type, TensorType)}) == 1:
        return parts
    found = []
    for part in parts:
        like = Ref(b.gather(op, op.args[0].name, part.region, part.device or 0))
        args = (Ref(part.name), like)
        cast = b.glue(op, f"{part.name}_cast", part.device or 0, "type_as", args, b.tensor(part.name))
        found.append(Part(cast, part.region, part.device))
    return tuple(found)


ELEMENTWISE = {
    **dict.fromkeys((*POINTWISE, *(name for name in LIKE if name.endswith("_like"))), Rule(_make, every)),
    **dict.fromkeys(CHANNEL_DROPOUTS, Rule(_make, lambda b, op: (0, 1))),
}

# Samples --------------------------------------------------------------------------------------------------------------

DEFAULTS = {"normalize": 1, "stack": 0}


def _first(b: GraphRewriter, name: str) -> Any:
    """The first dimension of a captured tensor, with symbolic sizes; None if it has none."""
    type = b.symbolic[name]
    return type.shape[0] if isinstance(type, TensorType) and type.shape else None


def dims(op: Op, rank: int) -> set[int]:
    """The dimensions that an op works over; all if it names none."""
    given = argument(op, *OVER_DIMS[op_name(op)], DEFAULTS.get(op_name(op)))
    if given is None or given in ((), []):
        return set(range(rank))
    return {int(dim) % rank for dim in (given if isinstance(given, (tuple, list)) else (given,))}


def _sample_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """The first dimension, if it is the samples' in the result and in all operands with samples, and has another size
    in all other operands. None for an op that reads no samples, such as a sum over positions."""
    read = [ref.name for ref in refs((op.args, dict(op.kwargs)))]
    samples = [name for name in read if name in b.samples]
    if op.writes or not samples or not isinstance(b.captured[op.name], TensorType):
        return ()
    rank = max(len(b.shape(name)) for name in samples)
    if op_name(op) in OVER_DIMS and 0 in dims(op, rank + (op_name(op) == "stack")):
        return ()
    if op_name(op) == "pad" and len(argument(op, 1, "pad")) > 2 * (rank - 1):
        return ()
    alike = all(_first(b, name) == _first(b, op.name) for name in samples)
    held = any(_first(b, name) == _first(b, op.name) for name in read if name not in samples)
    return () if held or not alike or any(name in b.numbers for name in read) else (0,)


def _make_samples(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    def call(region: Region, device: int) -> Called:
        def value(ref: Ref) -> Ref:
            samples = (region[0], *full(b.shape(ref.name)[1:])) if ref.name in b.samples else None
            return b.read(op, ref, samples, device)

        return op.target, *map_refs((op.args, dict(op.kwargs)), value)

    return each(b, op, places, call)


SAMPLES = dict.fromkeys(PER_SAMPLE, Rule(_make_samples, _sample_cuts))
