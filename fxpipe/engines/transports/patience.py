"""How long a rank waits for another one, in time during which it could have heard from it.

A machine that was suspended, or a process that was stopped, goes on with a clock that has moved: to a rank that waits,
all others seem to have been silent for that long. So only the time between two looks counts, and of that no more than
the wait between them takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

SOON = 2.0  # seconds between two looks, at most, and within which a rank that is gone is seen to be


@dataclass(slots=True)
class Patience:
    """`left`: the seconds that a wait may still take; `began`: when it began."""

    left: float
    _looked: float = field(default_factory=monotonic)
    began: float = field(default_factory=monotonic)

    def spent(self) -> bool:
        """Count the time since the last look, at most `SOON` seconds of it; whether nothing is left."""
        now = monotonic()
        self.left -= min(now - self._looked, SOON)
        self._looked = now
        return self.left <= 0
