"""Replicas of a stage: modules of the same class that hold the model's tensors for the time of a step.

A replica owns nothing. When a step begins it gets aliases of what its stage holds, copied where it is on another
device; gradients come back from these as from all aliases. Of a buffer that forward writes it gets a copy of its own,
which is forgotten: the model keeps what the stage itself, the first of the replicas, has written.
"""

from __future__ import annotations

from collections.abc import Sequence

from .gradient_aliases import Pair
from .stage import Stage


def fill(replica: Stage, stage: Stage, pairs: Sequence[Pair]) -> list[Pair]:
    """Let a replica hold what its stage does, and give the pairs of what needs a gradient. `pairs` are the stage's
    own."""
    owners = {id(stand_in): tensor for tensor, stand_in in pairs}
    found = []
    for path in stage.states:
        tensor = stage.tensor(path)
        held = tensor.detach().to(replica.device, copy=path in stage.mutates)
        if tensor.requires_grad:
            found.append((owners.get(id(tensor), tensor), held.requires_grad_()))
        replica.put(path, held)
    return found


def empty(replica: Stage) -> None:
    """Let a replica hold nothing, until the next step."""
    replica.elsewhere.clear()
    for path in replica.states:
        replica.put(path, replica.tensor(path).new_empty(0))
