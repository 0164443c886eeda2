"""Whether the workers share a step or one thread runs it alone: whichever is faster, by trying.

A worker that waits has to be woken, and Python runs one thread at a time. Where an action takes a few microseconds,
that costs more than the workers save; where it takes milliseconds, one thread alone would take as many times longer as
there are workers. Both compute the same, bit for bit: each stage runs its actions in the same order.
"""

from __future__ import annotations

TRIALS = 3
SMALL = 1e-3  # seconds an action: above it the workers always pay, and trying one thread would be dear


class ThreadAutotune:
    """What is known of steps of one size, which have so many actions."""

    def __init__(self, actions: int) -> None:
        self.actions = actions
        self.shared: list[float] = []
        self.alone: list[float] = []
        self.settled: bool | None = None

    def choose(self) -> bool:
        """Whether the next step runs alone.

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
        """A step took so long."""
        if self.settled is not None:
            return
        (self.alone if alone else self.shared).append(seconds)
        warm = self.shared[1:]
        if warm and min(warm) > SMALL * self.actions:
            self.settled = False
        elif warm and len(self.alone) >= TRIALS:
            self.settled = min(self.alone) < min(warm)
