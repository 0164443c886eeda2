"""From a model and a call to a `Graph`: `capture` for one graph, `CallCapture` for a module that calls stand behind,
`StepCapture` for a model with its loss;
`sample_dims` tells what of a graph may be cut between samples."""

from fxpipe.capture.batch.sample_dims import sample_dims

from .capture_call import CallCapture, capture
from .capture_errors import NoOps
from .capture_step import NO_TARGET, StepCapture

__all__ = ["NO_TARGET", "CallCapture", "NoOps", "StepCapture", "capture", "sample_dims"]
