"""Where the samples are in each value: what may be cut between them, and joined again."""

from __future__ import annotations

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import ScalarType, TensorType

from .batch_dimension import batch_dims, follow, multiple


def sample_dims(graph: Graph) -> dict[str, int | None]:
    """The dimension of each value that carries the samples, one after the other; None for values that are the same for
    all samples. Others are left out: what was made of all samples of a micro-batch, or numbers them."""
    flow = follow(graph)
    changing = flow.depends | flow.sizes
    for op in graph.ops:
        if changing.intersection(op.reads):
            changing |= {op.name, *op.writes}
    found: dict[str, int | None] = {}
    for name, kind in flow.types.items():
        dims = batch_dims(kind)
        if isinstance(kind, TensorType) and dims:
            whole = len(dims) == 1 and multiple(kind.shape[dims[0]]) is not None
            if whole and flow.outer.get(name, 1) == 1 and name not in flow.counted:
                found[name] = dims[0]
        elif isinstance(kind, (TensorType, ScalarType)) and name not in changing:
            found[name] = None
    return found
