"""Run generated stages in this process: a worker for each device, a clock, and autograd for backward.

    clock        0   1   2   3   4
    cpu:0       F0  F1  F2                 tick t runs the tasks (micro-batch i, stage j) with i + j = t in parallel;
    cpu:1           F0  F1  F2             before it, each stage's `ready` adds the dependencies of backward, and
    cpu:2               F0  F1  F2         copies the values of other devices

A generated scheduler is a `Pipeline` with methods `ready_j` and `compute_j` for each stage j. The calling thread, which
would otherwise only wait, is the worker of the last stage's device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from torch.profiler import record_function

from fxpipe.engines.common.scheduler_base import Batches, SchedulerBase
from fxpipe.engines.transports.mailbox import LIVENESS_POLL
from fxpipe.runtime.autograd.backward_notes import watching
from fxpipe.runtime.deferred_norms import commit, discard
from fxpipe.runtime.error_notes import add_note
from fxpipe.runtime.interrupts import Interrupts, ignore
from fxpipe.runtime.worker import Compute, Report, attempt
from fxpipe.torch_internals.op_modes import is_profiled

__all__ = ["Batches", "Pipeline", "clock"]

Tick = tuple[tuple[int, int], ...]


class Pipeline(SchedulerBase):
    """The base of schedulers that run forward, and leave backward to autograd."""

    def run(self, batch: Sequence[Any], chunks: int) -> tuple[Any, ...]:
        """The outputs, in order, for the inputs, in order, in at most `chunks` micro-batches."""
        self.wake()
        for stage in self._copying:
            stage.refresh()
        m = Batches(self.scatter(batch, chunks), self.place)
        self.lend(m)
        try:
            with Interrupts(ignore) as interrupts:
                self.run_ticks(m, interrupts)
        except BaseException:
            discard(self.mutating)
            raise
        commit(self.mutating)
        for stage in self._copying:
            stage.give_back()
        return self.returned(self.gather(m))

    def run_ticks(self, m: Batches, interrupts: Interrupts) -> None:
        """Run all ticks. Ctrl-C ends this after a tick."""
        ready = [getattr(self, f"ready_{j}", nothing) for j in range(len(self.stages))]
        compute = [self.watched(j) if m.grad else getattr(self, f"compute_{j}") for j in range(len(self.stages))]
        if is_profiled():
            compute = [in_range(j, one) for j, one in enumerate(compute)]
        for tick in clock(len(m), len(self.stages)):
            if interrupts.error is not None:
                return
            for i, j in tick:
                ready[j](m, i)
            self.tick(m, tick, compute)

    def tick(self, m: Batches, tick: Tick, compute: Sequence[Compute]) -> None:
        """Run the tasks of a tick, each on its worker, and wait for all. Raises the error of the lowest stage that
        failed."""
        reports: SimpleQueue[Report] = SimpleQueue()
        ours = []
        for task in tick:
            _, j = task
            worker = self._workers.get(self.devices[j])
            if worker is None:
                ours.append(task)
            else:
                worker.orders.put((compute[j], m, task, m.context, m.compute[j], reports))
        done = [attempt(compute[j], m, (i, j), stream=m.compute[j]) for i, j in ours]
        done += [self.await_report(reports) for _ in range(len(tick) - len(ours))]
        failed = [report for report in done if report is not None]
        if failed:
            raise self.failure(m, failed)

    def await_report(self, reports: SimpleQueue[Report]) -> Report:
        """The next report. Raises RuntimeError if a worker is gone: then the report may never come."""
        while True:
            try:
                return reports.get(timeout=LIVENESS_POLL)
            except Empty:
                self.check_alive()

    def failure(self, m: Batches, failed: Sequence[tuple[tuple[int, int], BaseException]]) -> BaseException:
        """The exception of the lowest stage that failed, with a note of its task."""
        (i, j), error = min(failed, key=lambda report: report[0][1])
        self.add_notes(error, m, j, i)
        return error

    def watched(self, j: int) -> Compute:
        """The `compute_j` of the scheduler. If the stage calls submodules whole, exceptions in their backward get a
        note."""
        stage = self.stages[j]
        compute: Compute = getattr(self, f"compute_{j}")
        if not stage.opaque:
            return compute

        def watched(m: Batches, i: int) -> None:
            # Autograd's graph refers to the lambda, so it must not refer to `m`, which refers to the graph.
            with watching(lambda error: add_note(error, stage, j, i, backward=True)):
                compute(m, i)

        return watched


def nothing(m: Batches, i: int) -> None:
    """Stands in for `ready_j` of a stage that has none."""


def in_range(j: int, compute: Compute) -> Compute:
    """What runs stage j, as a range of torch's profiler for each micro-batch (`profiler_ranges.py`)."""

    def ranged(m: Batches, i: int) -> None:
        with record_function(f"F{j}.{i}"):
            compute(m, i)

    return ranged


def clock(m: int, n: int) -> Iterator[Tick]:
    """The tasks (micro-batch, stage) of each tick, for m micro-batches and n stages.

    >>> list(clock(3, 2))
    [((0, 0),), ((1, 0), (0, 1)), ((2, 0), (1, 1)), ((2, 1),)]
    """
    for t in range(m + n - 1):
        yield tuple((t - j, j) for j in range(max(0, t - m + 1), min(n, t + 1)))
