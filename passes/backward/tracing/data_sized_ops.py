"""Ops that give tensors of a size that only a run tells: `x[mask]`, and the states of `ctc_loss`.

    chosen = x[mask]                    f32[u0<=12*b, 8]
    loss = ctc_loss(scores, chosen)     keeps f32[b, 50, loss_states<=2*(u0<=12*b)+1] for backward

Each such size is a symbol, as the batch size is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.graph.graph import Op, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.value_types import TensorType, ValueType, data_sizes, tensors
from fxpipe.passes.backward.tracing.fake_sizes import Sizes

aten = torch.ops.aten


def decided(kind: ValueType) -> dict[str, str]:
    """The sizes of a type that data decides, each with its bound."""
    return {name: text for one in tensors(kind) for dim in one.shape for name, text in data_sizes(dim).items()}


def decided_by(op: Op, types: Mapping[str, ValueType]) -> dict[str, str]:
    """The sizes that data decides in what an op gives, or keeps for its backward, each with its bound."""
    found = decided(op.type)
    if op_name(op) == "ctc_loss":
        targets = types.get(getattr(argument(op, 1, "targets"), "name", ""))
        if isinstance(targets, TensorType) and targets.shape:
            name = f"{op.name}_states"
            found[name] = f"{name}<=2*({targets.shape[-1]})+1"
    return found


def with_known_sizes(func: Any, args: tuple[Any, ...], sizes: Sizes, names: Collection[str]) -> Any:
    """What a function of torch gives on fake tensors, where one of these sizes stands for the one that only a run
    tells. None if the function gives no such thing."""
    if func is aten._ctc_loss.Tensor and len(names) == 1:
        scores = args[0]
        states = sizes.values[next(iter(names))]
        return scores.new_empty((scores.shape[1],)), scores.new_empty((scores.shape[1], scores.shape[0], states))
    if torch.Tag.dynamic_output_shape not in func.tags:
        return None
    result = func(*args)
    return sizes.told(result, names) if isinstance(result, Tensor) else result
