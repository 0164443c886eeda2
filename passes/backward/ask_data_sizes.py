"""Asks a tensor for its size, where data decides the size and backward needs the number: u0 = chosen.size(0)."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.value_types import ScalarType, TensorType, ValueType, data_sizes
from fxpipe.passes.backward.refused import Refused


def with_sizes_asked(forward: Sequence[Op], backward: Sequence[Op], types: dict[str, ValueType]) -> list[Op]:
    """The ops of forward, with one more after the first tensor of each size that data decides, where ops of forward or
    backward read the size. Adds the sizes to `types`. Raises Refused if no tensor has just that size."""
    unasked = {name for op in (*forward, *backward) for name in op.reads}
    decided = set[str]()
    found: list[Op] = []
    for op in forward:
        found.append(op)
        kind = types[op.name]
        for dim, size in enumerate(kind.shape if isinstance(kind, TensorType) else ()):
            for name, text in data_sizes(size).items():
                decided.add(name)
                if size == text and name in unasked:
                    unasked.remove(name)
                    types[name] = ScalarType("int")
                    found.append(Op(name, "size", (Ref(op.name), dim), {}, types[name], op.origin))
    if left := unasked & decided:
        raise Refused(f"no tensor has the size {min(left)}, which data decides")
    return found
