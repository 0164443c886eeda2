"""Ctrl-C while a step runs: told to the step, which ends soon and in order, in place of an exception at any bytecode.

An exception that comes between two bytecodes may leave a lock held, or a receive posted of which nobody knows: the next
step would wait for ever. And what C++ calls may drop it: Dynamo calls a guard, and takes an exception for "does not
hold".
"""

from __future__ import annotations

import threading

# What is behind the functions of `signal`, which make an enum of each number: that takes ten times as long.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType
from typing import Self


class Interrupts:
    """A context in which Ctrl-C calls `tell` with the exception that the handler of SIGINT raises (Python's own raises
    KeyboardInterrupt). A second Ctrl-C raises it at once. Without `tell`, each raises it at once.

    If the context then ends without an exception, it raises the one of the last Ctrl-C: none is lost. Does nothing in
    other threads than the main one, which never get a signal, or where SIGINT has no handler of Python's.

    - `error`: the exception of the last Ctrl-C, or None.
    """

    __slots__ = ("_before", "_tell", "error")

    def __init__(self, tell: Callable[[BaseException], object] | None = None) -> None:
        self._tell = tell
        self.error: BaseException | None = None
        self._before: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> Self:
        before = getsignal(SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal(SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        assert self._before is not None
        first = self.error is None
        try:
            self._before(number, frame)
        except BaseException as error:
            self.error = error
            if self._tell is None or not first:
                raise
            self._tell(error)

    def __exit__(self, kind: object, raised: BaseException | None, _: object) -> None:
        if self._before is not None:
            signal(SIGINT, self._before)
        error, self.error = self.error, None  # after that: what comes now is raised at once
        if raised is None and error is not None:
            raise error


def ignore(error: BaseException) -> None:
    """For a context that looks at `error`, or that Ctrl-C is to end no earlier."""
