"""The runtime that generated code uses. It does not import the rest of fxpipe."""

from fxpipe.runtime.autograd.activation_checkpoint import checkpoint
from fxpipe.runtime.autograd.dependency import fork, join
from fxpipe.runtime.autograd.device_copy import copy, wait
from fxpipe.runtime.autograd.generated_gradients import accumulate, accumulate_mm, gradients_of

from .deferred_norms import check_several_values, deferred_batch_norm, deferred_instance_norm
from .microbatch import MicroBatch
from .random import Draws
from .stage import Stage

__all__ = [
    "Draws", "MicroBatch", "Stage", "accumulate", "accumulate_mm", "check_several_values", "checkpoint", "copy",
    "deferred_batch_norm", "deferred_instance_norm", "fork", "gradients_of", "join", "wait",
]  # fmt: skip
