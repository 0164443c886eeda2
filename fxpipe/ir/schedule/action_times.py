"""What the actions of a step were measured to take, and what surrounds them.

A profile tells ops, and a stage is not the sum of its ops: a backward is one run of autograd, memory is new or used
before, and workers that share caches slow each other down. So here whole actions are timed; and each by itself, for
who waits for whom depends on which of them happened to be slow, and not on their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .schedule import Action


@dataclass(frozen=True)
class Times:
    """Seconds. `actions`: of each action (one of kind R is the recomputation before a B or I); `before`: from the call
    to the first action; `after`: from the last one to the end of the call, when the gradients are with the model;
    `wake`: from when a value is sent to when a worker that waits for it goes on."""

    actions: Mapping[Action, float]
    before: float = 0.0
    after: float = 0.0
    wake: float = 0.0
