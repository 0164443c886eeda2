"""fxpipe as a backend of torch.compile.

    compiled = torch.compile(model, backend="fxpipe", options={"devices": 4, "chunks": 8})

torch.compile traces the model, sets its guards and calls `backend` once for each graph. Backward is autograd's,
so micro-batches run in GPipe's order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tabulate import tabulate
from torch import fx

from fxpipe.errors import PlanError
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.options.compile_table import COMPILE
from fxpipe.pipe.options.read_options import read_options
from fxpipe.pipe.options.unknown_options import refuse_unknown

if TYPE_CHECKING:
    from fxpipe.pipe.build.compiled_graph import Compiled, Way

# The options of `fxpipe.compile` that apply to the backend.
OPTIONS = ("devices", "chunks", "schedule", "checkpoint", "memory_limit", "plan", "cut", "batch_dim",
           "reduce", "deferred_batch_norm", "dump")  # fmt: skip
HEADERS = ("graph", "line", "ops", "batch", "stages", "micro-batches", "why")
numbers = itertools.count()
living: weakref.WeakValueDictionary[int, Compiled] = weakref.WeakValueDictionary()


def backend(
    module: fx.GraphModule, example_inputs: Any, *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend of torch.compile: returns the function that runs in place of a graph that torch.compile has traced.

        compiled = torch.compile(model, backend="fxpipe", options={"devices": 4, "chunks": 8})

    A graph becomes a pipeline of micro-batches. It runs in one micro-batch, with a warning, if it cannot be cut along
    the batch; as plain code if it has fewer ops with parameters than there are stages, or cannot be captured:
    `fxpipe.backend.report()` says which, and why. The model's tensors do not move; stages on other devices have copies.

    `options` are arguments of `fxpipe.compile`: devices, chunks, checkpoint, memory_limit, plan, cut,
    batch_dim (by the name of the input's variable in the traced graph), reduce, deferred_batch_norm, dump. Invalid
    options raise PlanError when the compiled model is called. `mode` must be None.
    """
    from fxpipe.pipe.build.compiled_graph import Compiled  # late: torch's Dynamo takes more than a second

    try:
        compiled = Compiled(next(numbers), module, checked(options or {}, mode))
    except PlanError as error:
        refusal = error

        def refuse(*flat: Any) -> Any:  # raised here, it would reach the user as an error of torch.compile's own
            raise refusal

        return refuse
    living[compiled.number] = compiled

    def run(*flat: Any) -> Any:
        return compiled(*flat)

    return run


def checked(asked: Mapping[str, Any], mode: str | None) -> Options:
    """The options of the backend. Raises PlanError if they are invalid."""
    if mode is not None:
        raise PlanError(f"mode is {mode!r}: the backend fxpipe has no modes, leave it out")
    unknown = [str(name) for name in asked if name not in OPTIONS]
    if elsewhere := [name for name in unknown if name in COMPILE]:
        raise PlanError(f"{elsewhere[0]} is an option of fxpipe.compile alone; the backend has {', '.join(OPTIONS)}")
    refuse_unknown("the backend fxpipe", unknown, OPTIONS)
    if asked.get("schedule", "gpipe") != "gpipe":
        raise PlanError(
            f"schedule is {asked['schedule']!r}: torch.compile leaves backward to autograd, which follows GPipe's "
            "order; for others, write pipe = fxpipe.compile(model, ..., schedule=...) and pipe.step(...)"
        )
    if "plan" not in asked and not {"devices", "chunks"} <= asked.keys():
        raise PlanError(
            'say how many, as in torch.compile(model, backend="fxpipe", options={"devices": 4, "chunks": 8})'
        )
    return read_options(asked)


def report() -> str:
    """A table with a row for each graph from torch.compile and each batch size that it was called with: the line where
    the graph begins, and its stages and micro-batches, or why it is not a pipeline."""
    rows = [row(made, sizes, way) for made in living.values() for sizes, way in made.ways.items()]
    return tabulate(sorted(rows), headers=HEADERS, colalign=("right", "left", *["right"] * 4, "left"))


def row(made: Compiled, sizes: tuple[int, ...], way: Way) -> tuple[Any, ...]:
    """The row of a graph at these batch sizes, as in HEADERS."""
    batch = ", ".join(map(str, sizes))
    ops, _ = made.lifted.work
    if way.live is None:
        return made.number, str(made.lifted.origin), ops, batch, "", "", way.why
    stages = len(way.live.build.program.stages)
    chunks = max(1, min(way.live.chunks, *sizes)) if sizes else 1
    return made.number, str(made.lifted.origin), ops, batch, stages, chunks, way.why
