"""Measured times of the actions of a step, and of what surrounds them.

A stage does not take the sum of its ops' times: a backward is one run of autograd, memory is new or reused, and workers
that share caches slow each other down. So whole actions are timed, each by itself and not by the mean of its kind:
which device waits for which depends on the actions that happened to be slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .schedule import Action


@dataclass(frozen=True)
class Times:
    """Times in seconds.

    - `actions`: of each action; one of kind R is the recomputation before a B or I.
    - `before`: from the call to the first action.
    - `after`: from the last action to the end of the call, when the gradients are with the model.
    - `wake`: from sending a value until the worker that waits for it goes on.
    """

    actions: Mapping[Action, float]
    before: float = 0.0
    after: float = 0.0
    wake: float = 0.0
