"""Values that are cheaper to compute again in each stage that uses them than to send: sizes, and what depends on sizes
and literals alone, such as masks and position ids."""

from __future__ import annotations

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.shared_memory_values import known, memory_of
from fxpipe.ir.graph.value_types import VMAP, tensors
from fxpipe.ir.once import once


@once
def cheap_ops(graph: Graph) -> frozenset[str]:
    """The names of such values. Random ops, and what is written in place, needs a gradient or lives in a vmap, are not
    among them."""
    root = memory_of(graph)
    written = {root[name] for op in graph.ops for name in op.writes}
    cheap = {size.name for size in graph.sizes}
    for op in graph.ops:
        plain = known(op.target) and not op.random and not op.writes and root[op.name] not in written
        lasting = op.type != VMAP and not any(tensor.grad for tensor in tensors(op.type))
        if plain and lasting and cheap.issuperset(op.reads):
            cheap.add(op.name)
    return frozenset(cheap)
