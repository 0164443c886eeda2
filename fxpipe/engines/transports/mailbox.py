"""How values travel between workers: each has a box. To send puts a message into another's, and never waits; to receive
takes it from one's own, and waits if it is not there."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

LOST = 0.25  # seconds without a message after which a worker asks whether the others are alive
Key = tuple[int, int, str]  # stage, micro-batch, name


class Stopped(BaseException):
    """Another worker has failed. Never leaves the engine."""


class Mailbox:
    """What has arrived for a worker."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Key, Any] | None] = SimpleQueue()
        self.arrived: dict[Key, Any] = {}

    def wait(self, check: Callable[[], None]) -> None:
        """Until one more message is there."""
        while True:
            try:
                message = self.queue.get(timeout=LOST)
            except Empty:
                check()
                continue
            if message is None:
                raise Stopped
            self.arrived[message[0]] = message[1]
            return
