"""Ctrl-C is told, raised, or raised later, and never lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from fxpipe.errors import RankError
from fxpipe.runtime.interrupts import GRACE, Interrupts, InterruptShield, ignore

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


# The shield -----------------------------------------------------------------------------------------------------------


def test_a_shield_notes_two_and_raises_at_its_end() -> None:
    shield, done = InterruptShield(), 0
    with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
        press()
        with shield:
            press()
            done += 1
        done += 1
    assert (done, shield.presses, shield.error) == (2, 2, None)
    with shield:
        assert shield.presses == 0


def test_the_third_breaks_a_shield() -> None:
    with pytest.raises(KeyboardInterrupt), InterruptShield():  # noqa: PT012
        for _ in range(3):
            press()
        pytest.fail("the third one raises")


def test_a_shield_lets_in_what_may_come_and_nothing_while_that_is_handled() -> None:
    shield, handled = InterruptShield(), 0
    with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
        try:
            with shield.let_in():
                press()
                pytest.fail("it is let in")
        except KeyboardInterrupt:
            press()
            handled += 1
            raise
    with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
        press()
        handled += 1
        with shield.let_in():
            pytest.fail("what came before is raised")
    with pytest.raises(KeyboardInterrupt), shield, shield.let_in():  # noqa: PT012
        shield.close()
        press()
        handled += 1
    assert handled == 3


def test_how_long_waits_go_on() -> None:
    shield, now = InterruptShield(), time.monotonic()
    with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
        assert not shield.ends(now - GRACE - 1)
        press()
        assert not shield.ends(now)
        assert shield.ends(now - GRACE - 1)
        with shield.patiently():
            assert not shield.ends(now - GRACE - 1)
            press()
            assert shield.ends(now)


def test_which_error_a_shield_raises() -> None:
    for error, raised in ((RankError("rank 1: KeyboardInterrupt"), KeyboardInterrupt), (ValueError(), ValueError)):
        with pytest.raises(raised), InterruptShield():  # noqa: PT012
            press()
            raise error
    with pytest.raises(KeyboardInterrupt) as caught, InterruptShield() as shield:  # noqa: PT012
        press()
        assert shield.error is not None
        raise shield.error
    assert caught.value.__cause__ is None
