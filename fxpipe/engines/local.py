"""Run generated stages in this process: a worker for each device, a clock, and autograd for the way back.

    clock        0   1   2   3   4
    cpu:0       F0  F1  F2                 tick t runs the tasks (micro-batch i, stage j) with i + j = t, at once;
    cpu:1           F0  F1  F2             before it, each stage's `ready` draws the dependencies of backward and
    cpu:2               F0  F1  F2         copies what comes from other devices

A generated scheduler is a `Pipeline` with `ready_j` and `compute_j` for each stage j; here is what they have in
common. The calling thread, which would only wait, is the worker of the last stage's device.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from fxpipe.runtime import MicroBatch, Stage
from fxpipe.runtime.batchnorm import commit, discard
from fxpipe.runtime.context import current_context
from fxpipe.runtime.microbatch import gather, scatter, split_sizes
from fxpipe.runtime.note import add_note
from fxpipe.runtime.random import new_seed
from fxpipe.runtime.stream import Stream, Streams, current_stream
from fxpipe.runtime.worker import Compute, Report, Worker, attempt, close

Tick = tuple[tuple[int, int], ...]


class Batches(list[MicroBatch]):
    """The micro-batches of one run, and what holds for all of them.

    `sizes`: samples in each; `last`: the number of the last; `grad`: whether backward may follow; `seed`: of the random
    ops; `after[j]`: the token of stage j's latest checkpointed task; `lent`: tensors that stages borrow; `compute[j]`:
    the stream that stage j computes on.
    """

    def __init__(self, sizes: tuple[int, ...], stages: Sequence[Stage], draws: bool) -> None:
        super().__init__(MicroBatch() for _ in sizes)
        self.sizes = sizes
        self.last = len(sizes) - 1
        self.context = current_context()
        self.grad = self.context.grad and not self.context.inference
        self.seed = new_seed() if draws else 0
        self.after: list[Any] = [None] * len(stages)
        self.lent = MicroBatch()
        self.compute: tuple[Stream, ...] = tuple([current_stream(stage.device) for stage in stages])


class Pipeline:
    """The base of generated schedulers.

    `devices`: a worker label for each stage; `inputs`: the name and batch dimension (None: whole) of each; `sizes`: the
    name, input and dimension of the numbers known from shapes; `outputs`: the name, batch dimension and reduction of
    each; `detached`: the inputs that no gradient comes back to; `random`: whether any stage draws random numbers.
    """

    devices: tuple[str, ...] = ()
    inputs: tuple[tuple[str, int | None], ...] = ()
    sizes: tuple[tuple[str, str, int], ...] = ()
    outputs: tuple[tuple[str, int | None, str | None], ...] = ()
    detached: tuple[str, ...] = ()
    random: bool = False

    def __init__(self, stages: Sequence[Stage]) -> None:
        if len(stages) != len(self.devices):
            raise ValueError(f"the scheduler is for {len(self.devices)} stages, not {len(stages)}")
        self.stages = tuple(stages)
        self.streams = Streams(tuple(stage.device for stage in stages))
        self._mutating = tuple(stage for stage in stages if stage.mutates)
        self._copying = tuple(stage for stage in stages if stage.copies)
        self._on_cpu = any(stage.device.type == "cpu" for stage in stages)
        self._workers = {label: Worker(label) for label in sorted(set(self.devices) - {self.devices[-1]})}
        self._close = weakref.finalize(self, close, tuple(self._workers.values()))

    @property
    def source(self) -> str:
        """The text of the file that the scheduler came from."""
        return Path(inspect.getfile(type(self))).read_text(encoding="utf-8")

    def close(self) -> None:
        """End the worker threads. A pipe that is garbage collected closes itself."""
        self._close()

    def run(self, batch: Sequence[Any], chunks: int) -> tuple[Any, ...]:
        """The outputs, in order, for the inputs, in order, in at most `chunks` micro-batches."""
        if not (self._close.alive and all(worker.thread.is_alive() for worker in self._workers.values())):
            raise RuntimeError("the pipe has no workers: it was closed, or copied into this process by a fork")
        for stage in self._copying:
            stage.refresh()
        m = self.scatter(batch, chunks)
        self.lend(m)
        try:
            ready = [getattr(self, f"ready_{j}", nothing) for j in range(len(self.stages))]
            compute = [getattr(self, f"compute_{j}") for j in range(len(self.stages))]
            for tick in clock(len(m), len(self.stages)):
                for i, j in tick:
                    ready[j](m, i)
                self.tick(m, tick, compute)
        except BaseException:
            discard(self._mutating)
            raise
        commit(self._mutating)
        return self.gather(m)

    def scatter(self, batch: Sequence[Any], chunks: int) -> Batches:
        """The micro-batches, with their inputs and sizes."""
        total = {value.shape[dim] for value, (_, dim) in zip(batch, self.inputs, strict=True) if dim is not None}
        if len(total) > 1:
            raise ValueError(f"the inputs do not have a common batch size, but {sorted(total)}")
        if self._on_cpu:  # a stage on the CPU finds its inputs there; the others copy them from there
            batch = [value.cpu() if isinstance(value, Tensor) else value for value in batch]
        m = Batches(split_sizes(total.pop(), chunks) if total else (1,), self.stages, self.random)
        for value, (name, dim) in zip(batch, self.inputs, strict=True):
            value = value.detach() if name in self.detached else value
            for micro_batch, piece in zip(m, scatter(value, dim, m.sizes), strict=True):
                setattr(micro_batch, name, piece)
        for name, source, dim in self.sizes:
            for micro_batch in m:
                setattr(micro_batch, name, getattr(micro_batch, source).shape[dim])
        return m

    def lend(self, m: Batches) -> None:
        """Put what stages borrow from each other into `m.lent`."""

    def tick(self, m: Batches, tick: Tick, compute: Sequence[Compute]) -> None:
        """Run the tasks of a tick, each on its worker, and wait for all. The error of the lowest stage is raised
        here."""
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
        done += [reports.get() for _ in range(len(tick) - len(ours))]
        failed = [report for report in done if report is not None]
        if failed:
            raise self.failure(failed)

    def failure(self, failed: Sequence[tuple[tuple[int, int], BaseException]]) -> BaseException:
        """The exception of the lowest stage, itself, with a note that says where."""
        (i, j), error = min(failed, key=lambda report: report[0][1])
        add_note(error, self.stages[j], j, i)
        return error

    def gather(self, m: Batches) -> tuple[Any, ...]:
        """The outputs of the mini-batch."""
        return tuple(
            gather([getattr(micro_batch, name) for micro_batch in m], dim, reduce, m.sizes)
            for name, dim, reduce in self.outputs
        )


def nothing(m: Batches, i: int) -> None:
    """What a stage without `ready_j` needs before it runs."""


def clock(m: int, n: int) -> Iterator[Tick]:
    """The tasks (micro-batch, stage) of each tick, for m micro-batches and n stages.

    >>> list(clock(3, 2))
    [((0, 0),), ((1, 0), (0, 1)), ((2, 0), (1, 1)), ((2, 1),)]
    """
    for t in range(m + n - 1):
        yield tuple((t - j, j) for j in range(max(0, t - m + 1), min(n, t + 1)))
