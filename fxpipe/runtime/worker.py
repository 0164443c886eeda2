"""Threads that run the stages, one per worker label, alive as long as the pipe.

A stage always runs on the same thread. Autograd numbers its functions per thread, and runs later ones first in
backward. So B(i) runs before B(i - 1) in a first stage too, whose inputs need no gradient and cannot be joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any

from .caller_context import Context
from .streams import Stream, use_stream

Compute = Callable[[Any, int], None]
Task = tuple[int, int]  # micro-batch, stage
Report = tuple[Task, BaseException] | None  # None: all is well
Order = tuple[Compute, Any, Task, Context, Stream, "SimpleQueue[Report]"]


class Worker:
    """A thread that carries out orders, one after the other."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.orders, self.thread = _started(label)

    def start(self) -> None:
        """Start the thread again; orders of the one that is gone are dropped."""
        self.orders, self.thread = _started(self.label)

    def close(self) -> None:
        """End the thread after its present orders."""
        self.orders.put(None)


def _started(label: str) -> tuple[SimpleQueue[Order | None], Thread]:
    """A thread that works, and the queue of its orders."""
    orders = SimpleQueue[Order | None]()
    # A daemon: a program that ends without closing its pipe must end all the same.
    thread = Thread(target=_work, args=(orders,), name=f"fxpipe {label}", daemon=True)
    thread.start()
    return orders, thread


def close(workers: Iterable[Worker]) -> None:
    """End the threads of all workers."""
    for worker in workers:
        worker.close()


def attempt(compute: Compute, m: Any, task: Task, context: Context | None = None, stream: Stream = None) -> Report:
    """Run a task, in a context and on a stream if they are given. Returns None, or the task and its exception."""
    try:
        if context is None and stream is None:
            compute(m, task[0])
        else:
            with nullcontext() if context is None else context.enter(), use_stream(stream):
                compute(m, task[0])
    except BaseException as error:
        return task, error
    return None


def _work(orders: SimpleQueue[Order | None]) -> None:
    """Carry out orders until an order is None. Between orders the thread keeps no reference to a pipe, so an unused
    pipe is garbage collected, and closes its workers."""
    while order := orders.get():
        compute, m, task, context, stream, reports = order
        fresh = context.plain and stream is None  # the thread is in this context already
        report = attempt(compute, m, task, None if fresh else context, stream)
        del order, compute, m
        reports.put(report)
        del report, reports
