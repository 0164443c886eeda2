"""The dimension of the samples in each value: values that may be cut between samples, and joined again."""

from __future__ import annotations

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import ScalarType, TensorType, sized_by_data

from .batch_dimension import follow
from .batch_facts import batch_dims, multiple


def sample_dims(graph: Graph) -> dict[str, int | None]:
    """For each value the dimension that has the samples, in order; None if the value is the same for all samples.
    Values that depend on all samples of a micro-batch, sort them, or number them, are left out."""
    flow = follow(graph)
    changing = flow.depends | flow.sizes
    for op in graph.ops:
        if changing.intersection(op.reads):
            changing |= {op.name, *op.writes}
    found: dict[str, int | None] = {}
    for name, kind in flow.types.items():
        dims = batch_dims(kind)
        if isinstance(kind, TensorType) and dims and not sized_by_data(kind):
            whole = len(dims) == 1 and multiple(kind.shape[dims[0]]) is not None
            if whole and flow.outer(name) == 1 and name not in flow.counted and name not in flow.sorted:
                found[name] = dims[0]
        elif isinstance(kind, (TensorType, ScalarType)) and name not in changing:
            found[name] = None
    return found
