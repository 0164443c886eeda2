"""How a batch norm in training is spelled as an op, read in one place for the passes that care."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph import Op, Ref

_FUNCTIONAL = inspect.signature(F.batch_norm)
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")


def training_batch_norm(op: Op) -> Mapping[str, Any] | None:
    """The arguments by name of `F.batch_norm`, if the op is one that updates running statistics."""
    found = arguments(op)
    return found if found and found["training"] is True and isinstance(found["running_mean"], Ref) else None


def arguments(op: Op) -> Mapping[str, Any] | None:
    """The arguments by name of `F.batch_norm`, if the op is one."""
    if op.target is F.batch_norm:
        bound = _FUNCTIONAL.bind(*op.args, **op.kwargs)
        bound.apply_defaults()
        return bound.arguments
    if op.target is torch.batch_norm:
        return dict(zip(_NATIVE, op.args, strict=False)) | dict(op.kwargs)
    return None
