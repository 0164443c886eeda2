"""How long a rank waits for another one. Time in which it could not have heard from it does not count.

While a machine is suspended, or a process is stopped, the clock goes on: after that, all other ranks seem to have been
silent for so long. So a rank that waits looks at least every `SOON` seconds for what has come, and of the time between
two looks no more than that counts.
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
