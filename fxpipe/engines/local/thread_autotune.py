"""Measures whether a step is faster on all workers or on one thread alone.

A waiting worker has to be woken, and Python runs one thread at a time. If an action takes a few microseconds, that
costs more than the workers save; if it takes milliseconds, n workers are up to n times as fast as one thread. Both
compute the same, bit for bit: each stage runs its actions in the same order.
"""

from __future__ import annotations

TRIALS = 3
SMALL = 1e-3  # seconds per action; above it the workers are always faster, and a trial of one thread would be slow


class ThreadAutotune:
    """The measurements of steps of one size, each of `actions` actions."""

    def __init__(self, actions: int) -> None:
        self.actions = actions
        self.shared: list[float] = []
        self.alone: list[float] = []
        self.settled: bool | None = None

    def choose(self) -> bool:
        """Whether one thread runs the next step alone.

        >>> pace = ThreadAutotune(actions=100)
        >>> for seconds in (0.5, 0.05, 0.01, 0.04, 0.01, 0.05, 0.01):  # the first has much to do for the first time
        ...     pace.note(pace.choose(), seconds)
        >>> pace.choose()
        True
        """
        if self.settled is not None:
            return self.settled
        return 1 < len(self.shared) > len(self.alone) + 1

    def note(self, alone: bool, seconds: float) -> None:
        """Record the time of a step; decide once there are enough trials."""
        if self.settled is not None:
            return
        (self.alone if alone else self.shared).append(seconds)
        warm = self.shared[1:]
        if warm and min(warm) > SMALL * self.actions:
            self.settled = False
        elif warm and len(self.alone) >= TRIALS:
            self.settled = min(self.alone) < min(warm)
