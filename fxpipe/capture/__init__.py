"""From a model and a call to a `Graph`: `capture` makes one graph, `CallCapture` one for each kind of call of a model,
`StepCapture` one for each kind of step, with the loss. `sample_dims` tells what may be cut between samples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.capture.batch.sample_dims import sample_dims

from .call_arguments import NO_TARGET
from .capture_errors import NoOps

if TYPE_CHECKING:
    from .capture_call import CallCapture, capture
    from .capture_step import StepCapture

__all__ = ["NO_TARGET", "CallCapture", "NoOps", "StepCapture", "capture", "sample_dims"]

# What is imported when it is asked for: torch's Dynamo takes longer than the rest of fxpipe, and a saved pipeline does
# without it.
LATE = {"CallCapture": "capture_call", "capture": "capture_call", "StepCapture": "capture_step"}


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{LATE[name]}", __name__), name)
