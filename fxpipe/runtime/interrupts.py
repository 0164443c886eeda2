"""Ctrl-C while a step runs: told to the step, which ends soon and in order, in place of an exception at any bytecode.

An exception that comes between two bytecodes may leave a lock held, or a receive posted of which nobody knows: the next
step would wait for ever. And what C++ calls may drop it: Dynamo calls a guard, and takes an exception for "does not
hold".
"""

from __future__ import annotations

import threading

# What is behind the functions of `signal`, which make an enum of each number: that takes ten times as long.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Self

from fxpipe.errors import RankError

MOST = 2  # times that Ctrl-C is only noted
GRACE = 5.0  # seconds


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


class InterruptShield:
    """A context in which ranks exchange messages: Ctrl-C is noted, and raised at the end. In the middle, it would leave
    the other ranks waiting for messages that nobody sends. The context may be entered again inside itself.

    Who looks at `error` may end earlier, in order. Where nothing is half done, `let_in` lets Ctrl-C raise at once. The
    third Ctrl-C raises at once everywhere, whatever it breaks.

    - `error`: the exception of the last Ctrl-C, or None; at the end it is raised, also in place of a RankError.
    - `presses`: how often Ctrl-C has come.
    """

    __slots__ = ("_before", "_depth", "_open", "_patient", "error", "presses")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.presses = self._depth = 0
        self._open = self._patient = False
        self._before: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._depth == 0:
            before = getsignal(SIGINT)
            self.error, self.presses = None, 0
            if before != self._handle:
                self._before = before if callable(before) else None
                if self._before is not None:
                    signal(SIGINT, self._handle)
        self._depth += 1  # last: what was raised until now has changed nothing
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        assert self._before is not None
        try:
            self._before(number, frame)
        except BaseException as error:
            self.error = error
            self.presses += 1
            if self._open or self.broken:
                self.close()  # so that who handles it is not disturbed
                raise

    @property
    def broken(self) -> bool:
        """Whether Ctrl-C has been raised where it breaks something."""
        return self.presses > MOST

    def ends(self, began: float) -> bool:
        """Whether Ctrl-C ends a wait that began then, by `time.monotonic`: the second one, or outside of `patiently`
        the first, after `GRACE` seconds."""
        late = not self._patient and monotonic() - began > GRACE
        return self.presses > 1 or (self.presses > 0 and late)

    @contextmanager
    def patiently(self) -> Iterator[Self]:
        """This context, for a step: what ranks wait for there comes, as all of them are in it."""
        with self:
            self._patient = True
            try:
                yield self
            finally:
                self._patient = False

    @contextmanager
    def let_in(self) -> Iterator[None]:
        """A context in which Ctrl-C raises at once, until `close` or the first one."""
        self._open = True
        try:
            if self.error is not None:
                self.close()
                raise self.error
            yield
        finally:
            self.close()

    def close(self) -> None:
        """From here on Ctrl-C is only noted."""
        self._open = False

    def __exit__(self, kind: object, raised: BaseException | None, _: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        if self._before is not None:
            signal(SIGINT, self._before)
        error, self.error = self.error, None  # after that: what comes now is raised at once
        if error is not None and raised is not error and (raised is None or isinstance(raised, RankError)):
            raise error from raised
