"""Recognizes batch norms and instance norms among the ops, and reads their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph import op_arguments
from fxpipe.ir.graph.graph import Op, Ref

_NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")


def training_batch_norm(op: Op) -> Mapping[str, Any] | None:
    """The arguments of `F.batch_norm`, by name, if the op is one that updates running statistics; else None."""
    found = arguments(op)
    return found if found and found["training"] is True and isinstance(found["running_mean"], Ref) else None


def training_instance_norm(op: Op) -> Mapping[str, Any] | None:
    """The arguments of `F.instance_norm`, by name, if the op is one that updates running statistics; else None."""
    found = op_arguments.arguments(op) if op.target is F.instance_norm else {}
    return found if found.get("use_input_stats") is True and isinstance(found["running_mean"], Ref) else None


def arguments(op: Op) -> Mapping[str, Any] | None:
    """The arguments of `F.batch_norm`, by name, if the op is one; else None."""
    if op.target is F.batch_norm:
        return op_arguments.arguments(op)
    return op_arguments.by_name(op, _NATIVE) if op.target is torch.batch_norm else None
