"""A worker carries out orders in turn, on one thread, reports what they raise, and ends when closed."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from fxpipe.runtime.caller_context import Context, current_context
from fxpipe.runtime.worker import Worker, close


def test_orders_run_in_turn_on_one_thread() -> None:
    worker, reports, seen = Worker("cpu:7"), SimpleQueue[Any](), []

    def compute(m: str, i: int) -> None:
        seen.append((m, i, threading.current_thread().name))

    for i in range(3):
        worker.orders.put((compute, "m", (i, 0), current_context(), None, reports))
    assert [reports.get(timeout=60) for _ in range(3)] == [None] * 3
    assert seen == [("m", i, "fxpipe cpu:7") for i in range(3)]
    close([worker])
    worker.thread.join(60)
    assert not worker.thread.is_alive()


def test_what_is_raised_is_reported_and_the_thread_goes_on() -> None:
    worker, reports, error = Worker("cpu:7"), SimpleQueue[Any](), SystemExit(3)

    def fail(m: None, i: int) -> None:
        raise error

    worker.orders.put((fail, None, (4, 2), current_context(), None, reports))
    assert reports.get(timeout=60) == ((4, 2), error)
    worker.orders.put((lambda m, i: None, None, (5, 2), current_context(), None, reports))
    assert reports.get(timeout=60) is None
    worker.close()


def test_a_context_that_cannot_be_entered_is_reported() -> None:
    class Broken(Context):
        def enter(self) -> Any:
            raise RuntimeError("no such mode")

    worker, reports = Worker("cpu:7"), SimpleQueue[Any]()
    worker.orders.put((lambda m, i: None, None, (0, 0), Broken(False, False, ()), None, reports))
    assert "no such mode" in str(reports.get(timeout=60)[1])
    worker.close()
