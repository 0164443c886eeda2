"""Compares what a stage does at certain sizes with a trace that was taken at these sizes.

    size = 84 * b; y = x.view(size, 256)        is, where b is 13,        z = x.view(1092, 256)

Torch may have turned a size into a plain number in one of the traces, or compute it in another way; and values may have
other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, map_refs, rename
from fxpipe.ir.graph.value_types import ScalarType, TensorType, TupleType, ValueType, dim_size
from fxpipe.passes.backward.tracing.record_ops import SIZE_FUNCTIONS, aten
from fxpipe.passes.backward.tracing.traces import Piece, Trace


def same_at(sizes: Mapping[str, int], one: Trace, other: Trace) -> bool:
    """Whether both traces are the same at these sizes, which are all that there are."""
    return one == other or _at(sizes, one) == _at(sizes, other)


def _at(sizes: Mapping[str, int], trace: Trace) -> Trace:
    """The trace with numbers in place of sizes, and with numbered names."""
    numbers: dict[str, Any] = dict(sizes)
    written = {
        name for ops in (*(piece.ops for piece in trace.pieces), trace.backward) for op in ops for name in op.writes
    }
    forward = [_reshaped(_without_sizes(piece.ops, numbers), written) for piece in trace.pieces]
    backward = _reshaped(_without_sizes(trace.backward, numbers), written)
    gradients = [gradient for _, gradient in trace.roots if gradient]
    made = [*gradients, *(op.name for ops in (*forward, backward) for op in ops)]
    names = {name: f"%{number}" for number, name in enumerate(made)}

    def named(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(own, names.get(name, name)) for own, name in pairs]

    pieces = [
        Piece(
            _sized(piece.op, numbers), [rename(op, names) for op in ops],
            {place: names.get(name, name) for place, name in piece.results.items()}, piece.grad,
        )
        for piece, ops in zip(trace.pieces, forward, strict=True)
    ]  # fmt: skip
    return Trace(
        pieces, [rename(op, names) for op in backward], named(trace.roots), named(trace.takes), named(trace.weights)
    )


def _without_sizes(ops: Iterable[Op], numbers: dict[str, Any]) -> Iterator[Op]:
    """The ops that do not compute sizes; `numbers` then has what the others compute."""
    for op in ops:
        sized = _sized(op, numbers)
        if op.type == ScalarType("int") and op.target in SIZE_FUNCTIONS:
            numbers[op.name] = op.target(*sized.args)  # type: ignore[operator]
        else:
            yield sized


def _reshaped(ops: Iterable[Op], written: Set[str]) -> list[Op]:
    """The ops, with a view in place of a copy and its view: torch makes a copy where it does not know from symbols
    whether a tensor can be viewed."""
    found: list[Op] = []
    for op in ops:
        copied = found[-1] if found and found[-1].target is aten.clone.default else None
        if copied and op.target is aten._unsafe_view.default and op.args[0] == Ref(copied.name):
            given, shape = copied.args[0], op.args[1]
            if written.isdisjoint((given.name, copied.name, op.name)):
                found[-1] = replace(op, target=aten.view.default, args=(given, shape))
                continue
        found.append(op)
    return found


def _sized(op: Op, numbers: Mapping[str, Any]) -> Op:
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda ref: numbers.get(ref.name, ref))
    return replace(op, args=args, kwargs=kwargs, type=_type(op.type, numbers))


def _type(kind: ValueType, sizes: Mapping[str, Any]) -> ValueType:
    if isinstance(kind, TensorType):
        return replace(kind, shape=tuple(dim_size(dim, sizes) for dim in kind.shape))
    return TupleType(tuple(_type(item, sizes) for item in kind.items)) if isinstance(kind, TupleType) else kind
