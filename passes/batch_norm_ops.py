"""How an op that normalises by the statistics of its batch is spelled, read in one place for the passes that care."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref

_BATCH_NORM = inspect.signature(F.batch_norm)
_INSTANCE_NORM = inspect.signature(F.instance_norm)
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")


def training_batch_norm(op: Op) -> Mapping[str, Any] | None:
    """The arguments by name of `F.batch_norm`, if the op is one that updates running statistics."""
    found = arguments(op)
    return found if found and found["training"] is True and isinstance(found["running_mean"], Ref) else None


def training_instance_norm(op: Op) -> Mapping[str, Any] | None:
    """The arguments by name of `F.instance_norm`, if the op is one that updates running statistics."""
    if op.target is not F.instance_norm:
        return None
    found = _bound(_INSTANCE_NORM, op)
    return found if found["use_input_stats"] is True and isinstance(found["running_mean"], Ref) else None


def arguments(op: Op) -> Mapping[str, Any] | None:
    """The arguments by name of `F.batch_norm`, if the op is one."""
    if op.target is F.batch_norm:
        return _bound(_BATCH_NORM, op)
    if op.target is torch.batch_norm:
        return dict(zip(_NATIVE, op.args, strict=False)) | dict(op.kwargs)
    return None


def _bound(signature: inspect.Signature, op: Op) -> Mapping[str, Any]:
    bound = signature.bind(*op.args, **op.kwargs)
    bound.apply_defaults()
    return bound.arguments
