"""What is done to each number by itself: a part reads its own region of every operand, or all of a dimension that is
repeated. What the model does in place is done to copies: nobody else sees the memory of a part."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref, map_refs, op_name, refs
from fxpipe.ir.graph.ops import CHANNEL_DROPOUTS, LIKE, POINTWISE
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Places
from fxpipe.passes.sharding.sharding_rule import Rule, aligned, each, every

AUGMENTED = {
    operator.iadd: operator.add,
    operator.imul: operator.mul,
    operator.isub: operator.sub,
    operator.itruediv: operator.truediv,
}


def functional(op: Op) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op without its effect on what it reads: what it calls, and its arguments."""
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

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        def value(ref: Ref) -> Any:
            if ref.name in b.numbers:
                return b.numbers[ref.name]
            if not b.is_tensor(ref) or not _repeats(b.shape(ref.name), shape):
                return Ref(b.whole(op, ref.name, device))
            return Ref(b.gather(op, ref.name, aligned(region, b.shape(ref.name)), device))

        return target, *map_refs((args, kwargs), value)

    parts = each(b, op, places, call)
    return _cast(b, op, parts) if op.writes else parts


def _repeats(operand: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an operand broadcasts to this shape; one that is read for its dtype may not."""
    pairs = zip(reversed(operand), reversed(shape), strict=False)
    return len(operand) <= len(shape) and all(size in (1, whole) for size, whole in pairs)


def _cast(b: GraphRewriter, op: Op, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """What is written in place keeps its dtype."""
    types = [b.captured[ref.name] for ref in refs((op.args, dict(op.kwargs)))]
    if len({type.dtype for type in types if isinstance(type, TensorType)}) == 1:
        return parts
    found = []
    for part in parts:
        like = Ref(b.gather(op, op.args[0].name, part.region, part.device or 0))
        type = b.types[part.name]
        assert isinstance(type, TensorType)
        cast = b.glue(op, f"{part.name}_cast", part.device or 0, "type_as", (Ref(part.name), like), type)
        found.append(Part(cast, part.region, part.device))
    return tuple(found)


def _samples_and_channels(b: GraphRewriter, op: Op) -> Iterable[int]:
    return (0, 1)


ELEMENTWISE = {
    **dict.fromkeys((*POINTWISE, *(name for name in LIKE if name.endswith("_like"))), Rule(_make, every)),
    **dict.fromkeys(CHANNEL_DROPOUTS, Rule(_make, _samples_and_channels)),
}
