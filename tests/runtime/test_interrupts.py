"""Ctrl-C is told, raised, or raised later, and never lost."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from fxpipe.runtime.interrupts import Interrupts, ignore

pytestmark = pytest.mark.usefixtures("ctrl_c")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_is_told_and_raised_at_the_end() -> None:
    told, done = list[BaseException](), False
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts(told.append) as interrupts:  # noqa: PT012
        press()
        done = interrupts.error is told[0]
    assert done
    assert told == [caught.value]


def test_the_second_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts(ignore):  # noqa: PT012
        press()
        press()
        pytest.fail("the second one raises")


def test_one_that_is_dropped_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        with suppress(KeyboardInterrupt):  # as C++ does
            press()


def test_an_error_of_the_step_comes_first() -> None:
    with pytest.raises(ValueError, match="the step's"), Interrupts(ignore):  # noqa: PT012
        press()
        raise ValueError("the step's")


def test_one_inside_the_other() -> None:
    """As the engine's is inside that of a call; what the inner raises is not raised twice."""
    told = list[BaseException]()
    with pytest.raises(KeyboardInterrupt):
        with Interrupts(), Interrupts(told.append):
            press()
    assert len(told) == 1


def test_handlers_of_the_user_are_asked() -> None:
    """A handler that raises nothing, as one that ends a loop after its step, is called, and nothing else happens."""
    called = []
    signal.signal(signal.SIGINT, lambda *_: called.append("by the user"))
    try:
        with Interrupts(called.append):
            press()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert called == ["by the user"]


def test_other_threads_and_ignored_signals_change_nothing() -> None:
    errors = list[BaseException]()

    def enter() -> None:
        try:
            with Interrupts():
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not errors
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts(ignore):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        press()
    signal.signal(signal.SIGINT, signal.default_int_handler)
