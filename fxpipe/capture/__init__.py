"""From a model and a call to a `Graph`: `capture` makes one graph, `CallCapture` one for each kind of call of a model,
`StepCapture` one for each kind of step, with the loss. `sample_dims` tells what may be cut between samples."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpipe.batching.sample_dims import sample_dims
from fxpipe.ir.sample_lists import BatchDim

from .call_arguments import NO_TARGET
from .capture_errors import NoOps, StaticSizesRequired

if TYPE_CHECKING:
    from fxpipe.batching.mixed_samples import Reduce
    from fxpipe.ir.graph.graph import Graph

    from .capture_call import CallCapture
    from .capture_step import StepCapture

__all__ = ["NO_TARGET", "CallCapture", "NoOps", "StaticSizesRequired", "StepCapture", "capture", "sample_dims"]

# What is imported when it is asked for: torch's Dynamo takes longer than the rest of fxpipe, and a saved pipeline does
# without it.
LATE = {"CallCapture": "capture_call", "StepCapture": "capture_step"}


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{LATE[name]}", __name__), name)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    batch_dim: BatchDim = 0,
    *,
    reduce: "Reduce" = None,
) -> "Graph":
    """The graph of `model(*args, **kwargs)`. The model does not change. It does not run, and may be on the meta device,
    unless a submodule must be kept whole. Raises CaptureError.

    >>> from torch import nn, ones
    >>> print(capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (ones(4, 2),)).inputs[0].type)
    f32[b, 2]
    """
    from .capture_call import CallCapture

    return CallCapture(model, batch_dim, reduce=reduce).capture(args, kwargs or {})
