"""What the actions of a step were measured to take, by kind and stage, and what surrounds them.

A profile tells ops, and a stage is not the sum of its ops: a backward is one run of autograd, memory is new or used
before, and workers that share caches slow each other down. So here whole actions are timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Times:
    """Seconds. `actions`: by kind (F, B, I, W, or R for recomputation) and stage, for a micro-batch; `before`: from the
    call to the first action; `after`: from the last one to the end of the call, when the gradients are with the model;
    `wake`: from when a value is sent to when a worker that waits for it goes on."""

    actions: Mapping[tuple[str, int], float]
    before: float = 0.0
    after: float = 0.0
    wake: float = 0.0


def typical(rounds: Sequence[Times]) -> Times:
    """The medians of several rounds.

    >>> rounds = [Times({("F", 0): seconds}) for seconds in (1.0, 9.0, 2.0)]
    >>> typical(rounds).actions
    {('F', 0): 2.0}
    """
    return Times(
        {key: median(one.actions[key] for one in rounds) for key in rounds[0].actions},
        *(median(getattr(one, name) for one in rounds) for name in ("before", "after", "wake")),
    )
