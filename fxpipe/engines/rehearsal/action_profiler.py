"""Measures the time of each action of a step: each worker runs its row, on real values, and waits for no other.

    the step       cpu:0   F0  F1  F2          B0  F3  B1      B2      B3
                   cpu:1       F0  F1      B0  F2  B1  F3  B2      B3

    its rehearsal  cpu:0   F0  F1  F2  B0  F3  B1  B2  B3             the values of other workers are there already,
                   cpu:1   F0  F1  B0  F2  B1  F3  B2  B3             recorded in one real run

The code, the order, the memory in use and the load of the other workers are those of a real step. Only the waits for
other workers are missing: the simulator adds them. The model is not changed, nor its gradients, its buffers and the
state of the random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations
from math import inf
from queue import SimpleQueue
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.common.step import Step, wrap
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.common.step_plan import Method, Rows
from fxpipe.engines.common.step_timer import StepTimer
from fxpipe.engines.transports.mailbox import Key
from fxpipe.ir.cluster.cluster import Link
from fxpipe.ir.schedule.action_times import Times
from fxpipe.ir.schedule.schedule import Action
from fxpipe.ir.timeline import Timeline
from fxpipe.runtime.autograd.gradient_aliases import Pair, alias, commit_gradients
from fxpipe.runtime.deferred_norms import discard
from fxpipe.runtime.written_buffers import instead

# The times of each rehearsal, the outputs of the batch, and a timeline with the memory of each worker.
Rehearsed = tuple[list[Times], tuple[Any, ...], Timeline]
Sent = Mapping[Key, tuple[Any, bool]]  # each value that was sent, and whether it needs a gradient


class Rehearsal:
    """Rehearsals of the steps of a scheduler for one batch; all stages must be on the CPU."""

    def __init__(self, engine: StepScheduler, batch: Sequence[Any], chunks: int) -> None:
        """Runs the batch once, and records the values that stages exchange, the outputs, and the memory of each worker
        at its actions. That is the same in every step: it depends only on the order of the worker's own actions."""
        self.engine, self.batch, self.chunks = engine, batch, chunks
        self.grads: list[Pair] = []
        with untouched(engine):
            recorder = Recorder()
            m = engine.attempt(batch, chunks, None, recorder)
            self.sent: Sent = recorder.sent
            self.memory = recorder.timer.timeline(engine.schedule)
            self.outputs, _ = engine.outcome(m, batch)
        # Values stay where they are, but a worker that waits for one has to wake up.
        seconds = wake() if len(set(engine.devices)) > 1 else 0.0
        self.links = tuple(Link(ends, inf, seconds) for ends in combinations(sorted(set(engine.devices)), 2))

    def once(self) -> Times:
        """The times of one rehearsal. Its gradients are kept until the next one, as a model keeps them: if all memory
        were free between two, the process would give it back to the system, and get it page by page."""
        self.grads.clear()
        with untouched(self.engine):
            start = perf_counter()
            found = Replay(self.sent)
            m = self.engine.attempt(self.batch, self.chunks, None, found, found.rows(self.engine.timetable))
            _, pairs = self.engine.outcome(m, self.batch)
            copying = perf_counter()
            self.grads += stand_ins(pairs)
            copied = perf_counter()
            commit_gradients(self.grads)
            end = perf_counter()
        begins, ends = (
            edge(moments) for edge, moments in zip((min, max), zip(*found.moments, strict=True), strict=True)
        )
        return Times(
            dict(sorted(found.seconds.items())),
            before=begins - start - found.filling,
            after=end - ends - (copied - copying),
            links=self.links,
        )


class Recorder:
    """An observer that records the sent values, and counts the memory of the step."""

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
    """An observer that puts all recorded values into the mailboxes before the step begins.

    - `seconds`: the time of each action.
    - `moments`: when each action began and ended.
    - `filling`: the seconds that it took to fill the mailboxes.
    """

    def __init__(self, sent: Sent) -> None:
        self.sent = sent
        self.seconds: dict[Action, float] = {}
        self.moments: list[tuple[float, float]] = []
        self.filling = 0.0

    def begin(self, m: Step) -> None:
        start = perf_counter()
        for key, (value, grad) in self.sent.items():
            m.mailboxes[key[0]].values[key] = (
                value.detach().requires_grad_(grad) if isinstance(value, Tensor) else value
            )
        wrap(m, {"recompute": partial(timed_recompute, self.seconds), "_post": nobody_waits})
        self.filling = perf_counter() - start

    def rows(self, rows: Rows) -> Rows:
        """The same rows, with methods that measure their own time."""
        return {
            label: tuple([(action, self.timed(action.kind, action.stage, method)) for action, method in row])
            for label, row in rows.items()
        }

    def timed(self, kind: str, j: int, method: Method) -> Method:
        """The method of an action, made to measure its own time; recomputation in it counts separately."""

        def run(engine: StepScheduler, m: Step, i: int) -> None:
            start = perf_counter()
            method(engine, m, i)
            end = perf_counter()
            again = self.seconds.get(Action("R", j, i), 0.0) if kind in "BI" else 0.0
            self.seconds[Action(kind, j, i)] = end - start - again
            self.moments.append((start, end))

        return run


def timed_recompute(
    seconds: dict[Action, float], m: Step, recompute: Callable[[Step, int, int], None], j: int, i: int
) -> None:
    """Recompute, and note the seconds as those of an action of its own."""
    if m.kept[j, i].results is None:
        start = perf_counter()
        recompute(m, j, i)
        seconds[Action("R", j, i)] = perf_counter() - start


def nobody_waits(*message: Any) -> None:
    """Replaces `_post`: sends nothing."""


@contextmanager
def untouched(engine: StepScheduler) -> Iterator[None]:
    """In this context code leaves the model's buffers and the state of the random generator unchanged."""
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
    """The pairs with the model's tensors replaced by aliases that have copies of their gradients: to add gradients to
    these takes as long as in a real step, and leaves the model unchanged."""
    twins: dict[int, Tensor] = {}
    for tensor, _ in pairs:
        if id(tensor) not in twins:
            twins[id(tensor)] = twin = alias(tensor)
            twin.grad = tensor.grad.clone() if tensor.is_leaf and tensor.grad is not None else None
    return [(twins[id(tensor)], grads) for tensor, grads in pairs]


def wake(rounds: int = 50) -> float:
    """The median seconds from a thread's sending of a message until another, waiting thread goes on."""
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


def rehearse(engine: StepScheduler, batch: Sequence[Any], chunks: int, rounds: int, warmup: int = 1) -> Rehearsed:
    """Rehearse a step `rounds` times, after `warmup` times that do not count."""
    rehearsal = Rehearsal(engine, batch, chunks)
    return [rehearsal.once() for _ in range(warmup + rounds)][warmup:], rehearsal.outputs, rehearsal.memory
