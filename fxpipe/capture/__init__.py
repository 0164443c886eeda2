"""From a model and a call to a `Graph`: `capture` for one graph, `Front` for a module that calls stand behind,
`Stepper` for a model with its loss;
`sample_dims` tells what of a graph may be cut between samples."""

from .front import Front, capture
from .samples import sample_dims
from .step import NO_TARGET, Stepper

__all__ = ["NO_TARGET", "Front", "Stepper", "capture", "sample_dims"]
