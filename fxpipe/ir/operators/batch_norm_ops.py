"""Recognizes batch norms and instance norms among the ops, and reads their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph import op_arguments
from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.value_types import TensorType, ValueType

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


def with_one_value(op: Op, types: Mapping[str, ValueType]) -> Ref | None:
    """What a batch norm in training normalises, if it may have one value for each channel, which torch refuses: all of
    its sizes but that of the channels, dimension 1, are 1 or not known."""
    found = arguments(op)
    if not found or found["training"] is not True or not isinstance(x := found["input"], Ref):
        return None
    kind = types[x.name]
    sizes = (*kind.shape[:1], *kind.shape[2:]) if isinstance(kind, TensorType) else ()
    return None if any(type(size) is int and size > 1 for size in sizes) else x
