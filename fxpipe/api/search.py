"""`fxpipe.search`: how each operator of a model is cut and where its parts go, for the fastest step.

model ─profile─▶ Graph ─read─▶ OperatorGraph ─search─▶ Strategy
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Never

from torch import nn

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.matrix_speed import STORED
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.operators.operators import OperatorGraph, micro_batch_numbers
from fxpipe.ir.units import count
from fxpipe.pipe.build.call_binding import as_call
from fxpipe.pipe.options.option_forms import check as check_values
from fxpipe.pipe.options.option_table import SEARCH, read_cluster
from fxpipe.pipe.options.unknown_options import refuse_unknown
from fxpipe.pipe.progress import timed, working
from fxpipe.pipe.results.searched import Searched
from fxpipe.planning.operators.reading.read_operators import read

from .profile import profile


def search(
    what: nn.Module | OperatorGraph,
    cluster: Cluster | str,
    batch_size: int | None = None,
    *,
    example_inputs: Any = None,
    micro_batches: int | str = 1,
    budget: float = 60,
    seed: int = 0,
    progress: bool | None = None,
    method: str = "leaps",
    parameter_copies: float = 4,
    dtype: str | None = None,
    **unknown: Never,
) -> Searched:
    """Search for the strategy with the shortest simulated training step that fits in memory. `fxpipe.plan` puts whole
    layers on devices, as a pipeline; a strategy also cuts each operator. Where memory is short, groups of operators are
    recomputed in backward; which ones is part of the search.

    - `what`: a model, with `example_inputs` (it may be on the meta device), or a
      `fxpipe.ir.operators.operators.OperatorGraph`.
    - `cluster`: a `Cluster`, or the name of a published one, as for `fxpipe.plan`: "p100:4" has four P100s.
    - `batch_size`: samples in a step; if not given, as many as the inputs have.
    - `micro_batches`: into how many equal parts the samples of a step are cut. They run one after the other, and their
      gradients are added up: a device keeps the activations of one of them at a time. "auto": the number that divides
      the batch and with which the step is the fastest; with BatchNorm, 1.
    - `budget`: seconds to search. The search then ends once no change of a single operator makes the step faster.
    - `method`: "leaps" (changes many operators at once), or "mcmc" (FlexFlow's: Jia et al., "Beyond data and model
      parallelism for deep neural networks", 2019).
    - `seed`: of the search's random numbers.
    - `parameter_copies`: bytes in memory for each byte of parameters, as for `fxpipe.plan`.
    - `dtype`: the element type, as for `fxpipe.profile`; for a graph of operators, the type of its products.
    - `progress`: whether to show a bar; if not given, only where standard error is a terminal.

    Raises PlanError if the model has an op of an unknown kind (the message names the user's line), if numba is missing
    (`pip install 'fxpipe[search]'`), if the batch cannot be cut into equal micro-batches, or if no strategy was found
    that fits in the memory of all devices.

    >>> import torch, fxpipe
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    >>> found = fxpipe.search(model, "p100:4", example_inputs=torch.ones(8, 4096), budget=1)
    >>> found.seconds < found.data_parallel.seconds
    True
    """
    refuse_unknown("fxpipe.search", unknown, (*SEARCH, "example_inputs"))
    check_values(SEARCH, locals())
    where = read_cluster(cluster)
    if isinstance(what, OperatorGraph):
        graph = what if dtype is None else replace(what, dtype=dtype, element=DTYPES[STORED[dtype]].size)
    else:
        graph = operators_of(what, where, example_inputs, batch_size, dtype)
    try:
        # Imported here because it needs numba, which only the search does.
        from fxpipe.planning.operators.strategy_search import compile_core
        from fxpipe.planning.operators.strategy_search import search as fastest
    except ImportError as error:
        raise PlanError(str(error)) from None
    numbers = micro_batch_numbers(graph) if isinstance(micro_batches, str) else (micro_batches,)
    shown = sys.stderr.isatty() if progress is None else progress
    what_for = f"{graph.name} for {count(len(where.devices), 'device', 'devices')}"
    with working(f"searching a strategy of {what_for}, for {budget:g} s"), timed("searching"):
        with timed("compiling, once for an installation"):
            compile_core()
        try:
            found = fastest(
                graph,
                where,
                budget=budget,
                seed=seed,
                progress=shown,
                method=method,
                copies=parameter_copies,
                micro_batches=numbers,
            )
        except ValueError as error:
            raise PlanError(str(error)) from None
    return Searched(graph, where, found.strategy, found.trace, found.proposals, parameter_copies)


def operators_of(
    model: nn.Module, cluster: Cluster, example_inputs: Any, batch_size: int | None, dtype: str | None = None
) -> OperatorGraph:
    """The operators of a model, for a batch of `batch_size` samples (None: those of `example_inputs`)."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"cannot search for a {type(model).__name__}: give a model, or a graph of operators")
    if example_inputs is None:
        raise PlanError("a strategy is for a kind of call: say which, as in example_inputs=(x,)")
    args, kwargs = as_call(example_inputs)
    known = profile(model, *args, device=cluster, batch=batch_size, reduce="mean", dtype=dtype, **kwargs)
    with timed("operators"):
        made = read(known.graph, known.sizes).operators
        put_out = sum(operator.elements for operator in made if operator.kind != "input") * made.element
        kept = sum(op.saved for op in known.ops) / put_out if put_out else 1.0
        return replace(made, dtype=known.products or made.dtype, kept=kept)
