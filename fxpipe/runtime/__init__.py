"""The bricks that generated code stands on. Nothing here imports the rest of fxpipe."""

from .batchnorm import deferred_batch_norm
from .checkpoint import checkpoint
from .copy import copy, wait
from .dependency import fork, join
from .microbatch import MicroBatch
from .random import Draws
from .stage import Stage

__all__ = ["Draws", "MicroBatch", "Stage", "checkpoint", "copy", "deferred_batch_norm", "fork", "join", "wait"]
