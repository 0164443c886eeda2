"""The pipe: a drop-in module that captures the model at each new kind of call and runs the generated pipeline.

    call ─front─▶ a kind seen before? ──yes──▶ its scheduler runs the batch
                        │no
                        └▶ capture, build the street for it, keep it

One pipe holds several builds (train, eval, another number or shape) and one set of parameters: the first build decides
where each parameter lives, later ones follow.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import street
from .capture import Front
from .errors import FxpipeError, PackageError
from .options import Options
from .report import explain
from .runtime import Stage
from .shell import Shell
from .street import Build
from .viz.svg import timeline_svg


class Pipe(Shell):
    """What `fxpipe.compile` returns; see there."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model)
        own: dict[str, Any] = {
            "options": options,
            "_front": Front(model, options.batch_dim, options.reduce, options.chunks),
            "_builds": {},
            "_lock": threading.RLock(),
            "_folder": tempfile.TemporaryDirectory(prefix="fxpipe-"),
        }
        self.__dict__.update(own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, computed in micro-batches by the stages.

        Arguments are the model's own. Raises InputError where they cannot be cut into micro-batches, CaptureError where
        the model cannot be captured, and whatever the model raises, with a note of stage, micro-batch and line.
        """
        with self._lock:
            return self._front(args, kwargs, self._run)
