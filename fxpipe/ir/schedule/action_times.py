"""Measured times of the actions of a step, and of what surrounds them.

A stage does not take the sum of its ops' times: a backward is one run of autograd, memory is new or reused, and workers
that share caches slow each other down. So whole actions are timed, each by itself and not by the mean of its kind:
which device waits for which depends on the actions that happened to be slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fxpipe.ir.cluster.cluster import Link
from fxpipe.ir.timeline import Span

from .schedule import Action


@dataclass(frozen=True)
class Times:
    """Times in seconds.

    - `actions`: of each action; one of kind R is the recomputation before a B or I.
    - `messages`: of an action those before and after it computes, in which it reads and writes messages; none where it
      takes no time.
    - `before`: from the call to the first action.
    - `after`: from the last action to the end of the call, when the gradients are with the model.
    - `links`: for each two workers how soon one goes on that waits for a value of the other. A link between workers
      that share memory has infinite bandwidth, as values stay where they are.
    """

    actions: Mapping[Action, float]
    messages: Mapping[Action, tuple[float, float]] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0
    links: tuple[Link, ...] = ()

    def computing(self, span: Span) -> Span:
        """The part of an action's span in which it computes, which is what a timed step shows."""
        before, after = self.messages.get(Action(span.kind, span.stage, span.micro_batch), (0.0, 0.0))
        return replace(span, start=span.start + before, end=span.end - after)
