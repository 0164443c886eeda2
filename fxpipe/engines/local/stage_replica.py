"""Replicas of a stage: modules of the same class that hold the model's tensors during a step.

A replica owns no tensors. When a step begins it gets aliases of the stage's tensors, or copies if it is on another
device; their gradients are collected as those of all aliases. Of a buffer that forward writes it gets a copy, which is
dropped: the model keeps the contents that the stage itself, the first replica, has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fxpipe.runtime.autograd.gradient_aliases import Pair
from fxpipe.runtime.stage import Stage


def fill(replica: Stage, stage: Stage, pairs: Sequence[Pair]) -> list[Pair]:
    """Fill a replica with the tensors of its stage, and return the pairs (model's tensor, replica's alias) of those
    that need a gradient. `pairs`: the stage's own pairs."""
    owners = {id(stand_in): tensor for tensor, stand_in in pairs}
    found = []
    for path in stage.states:
        tensor = stage.tensor(path)
        own = tensor.detach().to(replica.device, copy=path in stage.mutates)
        if tensor.requires_grad:
            found.append((owners.get(id(tensor), tensor), own.requires_grad_()))
        held, name = replica.slot(path)
        held[name] = own
    return found


def empty(replica: Stage) -> None:
    """Replace the tensors of a replica by empty ones, until the next step."""
    replica.elsewhere.clear()
    for path in replica.states:
        held, name = replica.slot(path)
        held[name] = nothing(held[name].dtype, held[name].device)


def let_go(replica: Stage) -> None:
    """Let a new replica hold empty tensors, and none of the model's."""
    empty(replica)
    for path in replica.states:
        replica.put(path, replica.tensor(path))


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)
