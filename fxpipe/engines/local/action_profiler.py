"""What the actions of a step take: each worker runs its row, on real values, and waits for nobody.

    the step       cpu:0   F0  F1  F2          B0  F3  B1      B2      B3
                   cpu:1       F0  F1      B0  F2  B1  F3  B2      B3

    its rehearsal  cpu:0   F0  F1  F2  B0  F3  B1  B2  B3             what another worker would send is there already,
                   cpu:1   F0  F1  B0  F2  B1  F3  B2  B3             from one true run

So all is as in a step (the code, the order, how much memory is held, the other worker busy at the same time, and with
as much) but who waits for whom and how long: that is for the simulator to tell. Nothing that the model holds is
changed, gradients, buffers and random state included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.common.step import Method, Rows, Step, wrap
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.common.step_timer import StepTimer
from fxpipe.engines.transports.mailbox import Key
from fxpipe.ir.schedule.action_times import Times
from fxpipe.ir.schedule.schedule import Action
from fxpipe.ir.timeline import Steps
from fxpipe.runtime.deferred_norms import discard
from fxpipe.runtime.gradient_aliases import Pair, alias, commit_gradients
from fxpipe.runtime.written_buffers import instead

Sent = Mapping[Key, tuple[Any, bool]]  # what was sent to whom, and whether it is to have a gradient


class Rehearsal:
    """Rehearsals of the steps of a scheduler for one batch; all stages must be on the CPU."""

    def __init__(self, engine: StepScheduler, batch: Sequence[Any], chunks: int) -> None:
        """Runs the batch once, for the values that stages exchange, the outputs, and the most that each worker holds:
        that is the same in every step, for it depends on the order of the worker's own actions alone."""
        self.engine, self.batch, self.chunks = engine, batch, chunks
        with untouched(engine):
            recorder = Recorder()
            m = engine.attempt(batch, chunks, None, recorder)
            self.sent: Sent = recorder.sent
            self.memory = recorder.timer.timeline(engine.schedule).memory
            self.outputs, _ = engine.outcome(m, batch)

    def once(self) -> Times:
        """One rehearsal."""
        with untouched(self.engine):
            start = perf_counter()
            found = Replay(self.sent)
            m = self.engine.attempt(self.batch, self.chunks, None, found, found.rows(self.engine.timetable))
            _, pairs = self.engine.outcome(m, self.batch)
            copying = perf_counter()
            pairs = stand_ins(pairs)
            copied = perf_counter()
            commit_gradients(pairs)
            end = perf_counter()
        begins, ends = (
            edge(moments) for edge, moments in zip((min, max), zip(*found.moments, strict=True), strict=True)
        )
        return Times(
            dict(sorted(found.seconds.items())),
            before=begins - start - found.filling,
            after=end - ends - (copied - copying),
            wake=wake() if len(set(self.engine.devices)) > 1 else 0.0,
        )


class Recorder:
    """An observer that keeps what is sent, and counts the memory that the step takes."""

    def __init__(self) -> None:
        self.timer = StepTimer()
        self.sent: dict[Key, tuple[Any, bool]] = {}

    def begin(self, m: Step) -> None:
        self.timer.begin(m)
        wrap(m, {"_post": self.post})

    def post(
        self, m: Step, post: Callable[..., None], j: int, i: int, target: int, name: str, value: Any, grad: bool
    ) -> None:
        self.sent[target, i, name] = value, grad
        post(m, j, i, target, name, value, grad)


class Replay:
    """An observer of a step to which all has been sent before it begins.

    `seconds`: of each action; `moments`: when each action began and ended; `filling`: seconds that it took to put the
    values where they are found.
    """

    def __init__(self, sent: Sent) -> None:
        self.sent = sent
        self.seconds: dict[Action, float] = {}
        self.moments: list[tuple[float, float]] = []

    def begin(self, m: Step) -> None:
        start = perf_counter()
        for key, (value, grad) in self.sent.items():
            m.mailboxes[key[0]].arrived[key] = (
                value.detach().requires_grad_(grad) if isinstance(value, Tensor) else value
            )
        wrap(m, {"recompute": self.recompute, "_post": nobody_waits})
        self.filling = perf_counter() - start

    def rows(self, rows: Rows) -> Rows:
        """The same with methods that note how long they take."""
        return {
            label: tuple([(action, self.timed(action.kind, action.stage, method)) for action, method in row])
            for label, row in rows.items()
        }

    def timed(self, kind: str, j: int, method: Method) -> Method:
        """The method of an action, that notes how long it takes; recomputation counts apart."""

        def run(engine: StepScheduler, m: Step, i: int) -> None:
            start = perf_counter()
            method(engine, m, i)
            end = perf_counter()
            again = self.seconds.get(Action("R", j, i), 0.0) if kind in "BI" else 0.0
            self.seconds[Action(kind, j, i)] = end - start - again
            self.moments.append((start, end))

        return run

    def recompute(self, m: Step, recompute: Callable[[Step, int, int], None], j: int, i: int) -> None:
        if m.kept[j, i].results is None:
            start = perf_counter()
            recompute(m, j, i)
            self.seconds[Action("R", j, i)] = perf_counter() - start


def nobody_waits(*message: Any) -> None:
    """In the place of what would send it."""


@contextmanager
def untouched(engine: StepScheduler) -> Iterator[None]:
    """What runs in this context leaves no trace in the model's buffers or in the state of random numbers."""
    with ExitStack() as contexts:
        contexts.enter_context(torch.random.fork_rng(devices=[]))
        for stage in engine.stages:
            copies = {path: stage.tensor(path).detach().clone() for path in stage.mutates}
            contexts.enter_context(instead(stage, copies))
        try:
            yield
        finally:
            discard(engine.stages)


def stand_ins(pairs: Sequence[Pair]) -> list[Pair]:
    """The same with other tensors for those of the model, which have copies of their gradients: to add to them takes
    as long."""
    twins: dict[int, Tensor] = {}
    for tensor, _ in pairs:
        if id(tensor) not in twins:
            twins[id(tensor)] = twin = alias(tensor)
            twin.grad = tensor.grad.clone() if tensor.is_leaf and tensor.grad is not None else None
    return [(twins[id(tensor)], grads) for tensor, grads in pairs]


def wake(rounds: int = 50) -> float:
    """Seconds from when a thread sends a message to when another, that waits for it, goes on."""
    there, back = SimpleQueue[float](), SimpleQueue[float]()

    def answer() -> None:
        for _ in range(rounds):
            there.get()
            back.put(perf_counter())

    thread = Thread(target=answer)
    thread.start()
    seconds = []
    for _ in range(rounds):
        start = perf_counter()
        there.put(start)
        back.get()
        seconds.append((perf_counter() - start) / 2)
    thread.join()
    return median(seconds)


def rehearse(
    engine: StepScheduler, batch: Sequence[Any], chunks: int, rounds: int, warmup: int = 1
) -> tuple[list[Times], tuple[Any, ...], tuple[Steps, ...]]:
    """The times of several rehearsals, after some that do not count; the outputs of the batch; and the most bytes that
    each worker holds."""
    rehearsal = Rehearsal(engine, batch, chunks)
    return [rehearsal.once() for _ in range(warmup + rounds)][warmup:], rehearsal.outputs, rehearsal.memory
