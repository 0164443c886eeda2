"""Mailboxes, through which workers exchange values. A send puts a message into the receiver's mailbox and never waits;
a receive takes a message from the worker's own mailbox, and waits until it has arrived."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

LIVENESS_POLL = 0.25  # seconds without a message after which a worker checks that the others are alive
Key = tuple[int, int, str]  # stage, micro-batch, name


class Stopped(BaseException):
    """Another worker has failed. The engine never raises it to the user."""


class Transport(Protocol):
    """How messages get to a stage. `values`: those that have arrived and are not taken, by key."""

    values: dict[Key, Any]

    @property
    def put(self) -> Callable[[tuple[Key, Any] | None], None]:
        """Send a message, without waiting; None stops the receiver."""

    def wait(self, key: Key) -> None:
        """Wait until this message has arrived. Raises Stopped if another worker has failed."""


class Mailbox:
    """Messages to a thread of this process. `check` raises an error if another thread is gone."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._queue = SimpleQueue[tuple[Key, Any] | None]()
        self._check = check
        self.values: dict[Key, Any] = {}
        self.put = self._queue.put

    def wait(self, key: Key) -> None:
        while key not in self.values:
            try:
                message = self._queue.get(timeout=LIVENESS_POLL)
            except Empty:
                self._check()
                continue
            if message is None:
                raise Stopped
            self.values[message[0]] = message[1]
