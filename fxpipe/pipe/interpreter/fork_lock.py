"""The lock of a pipe, which only one thread at a time may use, in a process that may fork.

A forked child has only the forking thread: a lock that another thread held is never released there, and the work of
that thread is half done. With a plain lock the child would wait for ever.
"""

from __future__ import annotations

import os
import threading
import weakref

from fxpipe.errors import FxpipeError

_all: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """Reentrant. In a child that was forked while another thread held it, entering raises FxpipeError."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lost = False
        _all.add(self)

    def __enter__(self) -> None:
        if self._lost:
            raise FxpipeError(
                "this process was forked while another thread used this pipe, so its copy of the pipe is unfinished "
                "work; compile the model again here, or start the process with multiprocessing's 'spawn'"
            )
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def forked(self) -> None:
        """In a new child: note whether another thread held the lock at the fork."""
        self._lost = not self._lock.acquire(blocking=False)
        if not self._lost:
            self._lock.release()


def _look() -> None:
    for lock in list(_all):
        lock.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_look)
