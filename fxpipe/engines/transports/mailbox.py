"""How values travel between workers: each has a mailbox. To send puts a message into another's, and never waits; to
receive takes it from one's own, and waits if it is not there."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

LOST = 0.25  # seconds without a message after which a worker asks whether the others are alive
Key = tuple[int, int, str]  # stage, micro-batch, name


class Stopped(BaseException):
    """Another worker has failed. Never leaves the engine."""


class Transport(Protocol):
    """How messages go to a stage, and how what has been sent to it is found: in `arrived`."""

    arrived: dict[Key, Any]

    @property
    def put(self) -> Callable[[tuple[Key, Any] | None], None]:
        """Send a message, without waiting; None stops who waits."""

    def wait(self, key: Key) -> None:
        """Until this message has arrived. Raises Stopped."""


class Mailbox:
    """Messages for a thread of this process. `check` raises an error if another thread is gone."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._queue = SimpleQueue[tuple[Key, Any] | None]()
        self._check = check
        self.arrived: dict[Key, Any] = {}
        self.put = self._queue.put

    def wait(self, key: Key) -> None:
        while key not in self.arrived:
            try:
                message = self._queue.get(timeout=LOST)
            except Empty:
                self._check()
                continue
            if message is None:
                raise Stopped
            self.arrived[message[0]] = message[1]
