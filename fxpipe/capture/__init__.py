"""From a model and a call to a `Graph`: `capture` makes one graph, `CallCapture` one for each kind of call of a model,
`StepCapture` one for each kind of step, with the loss. `sample_dims` tells what may be cut between samples."""

from fxpipe.capture.batch.sample_dims import sample_dims

from .capture_call import CallCapture, capture
from .capture_errors import NoOps
from .capture_step import NO_TARGET, StepCapture

__all__ = ["NO_TARGET", "CallCapture", "NoOps", "StepCapture", "capture", "sample_dims"]
