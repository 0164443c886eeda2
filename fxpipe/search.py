"""`fxpipe.search`: how each operator of a model is cut and where its parts go, for the fastest step.

model ─profile─▶ Graph ─read─▶ OperatorGraph ─search─▶ Strategy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .clock import timed
from .errors import PlanError
from .ir.cluster import Cluster
from .ir.operators import OperatorGraph
from .profile import profile
from .searched import Searched
from .soap.reading import read
from .soap.strategies import data_parallel, expert, model_parallel


def search(
    what: nn.Module | OperatorGraph,
    cluster: Cluster,
    *,
    example_inputs: Any = None,
    batch: int | None = None,
) -> Searched:
    """The strategy for training steps of `what` on `cluster`.

    - `what`: a model, with `example_inputs` (it may be on the meta device), or a graph of operators.
    - `batch`: samples in a step, those of the inputs if not given.

    Raises PlanError where an op of the model is of no known kind, with the user's line.

    >>> from torch import ones
    >>> from fxpipe.ir.clusters import preset
    >>> model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    >>> found = search(model, preset("k80:4"), example_inputs=ones(8, 4096))
    >>> [config.degrees for config in found.strategy.configs[1:]]
    [(1, 4), (1, 4)]
    """
    graph = what if isinstance(what, OperatorGraph) else operators_of(what, cluster, example_inputs, batch)
    devices = len(cluster.devices)
    known = (data_parallel, expert, model_parallel)
    with timed("searching"):
        return min((Searched(graph, cluster, make(graph, devices)) for make in known), key=lambda one: one.seconds)


def operators_of(model: nn.Module, cluster: Cluster, example_inputs: Any, batch: int | None) -> OperatorGraph:
    """The operators of a model, for a batch of so many samples."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"cannot search for a {type(model).__name__}: give a model, or a graph of operators")
    if example_inputs is None:
        raise PlanError("a strategy is for a kind of call: say which, as in example_inputs=(x,)")
    how: dict[str, Any] = {"device": cluster, "batch": batch, "reduce": "mean"}
    if isinstance(example_inputs, Mapping):
        known = profile(model, **how, **example_inputs)
    else:
        known = profile(model, *(example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), **how)
    with timed("operators"):
        return read(known.graph, known.sizes).operators
