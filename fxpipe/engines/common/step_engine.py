"""Run generated stages in this process, forward and backward of a whole batch in one go, in the order of a schedule.

    cpu:0   F0  F1  F2          B0  F3  B1      B2      B3      every worker runs its own row. An action starts when
    cpu:1       F0  F1      B0  F2  B1  F3  B2      B3          the one before it has ended and its inputs are there
    cpu:2           F0  B0  F1  B1  F2  B2  F3  B3

On CPU workers a step of tiny actions may be faster if one thread runs all rows: `thread_autotune.py` measures that.

A generated scheduler is a `StepScheduler` with methods `forward_j`, `backward_j` and so on for each stage j, which say
what a `Step` computes and sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.local.thread_autotune import ThreadAutotune
from fxpipe.engines.transports.mailbox import LIVENESS_POLL, Mailbox, Stopped
from fxpipe.errors import PackageError
from fxpipe.ir.schedule.schedule import Schedule, at_once, order, parse
from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.gradient_aliases import Pair, alias, commit_gradients, put_together, standing_in
from fxpipe.runtime.caller_context import Context
from fxpipe.runtime.deferred_norms import commit, discard
from fxpipe.runtime.interrupts import Interrupts
from fxpipe.runtime.streams import use_stream
from fxpipe.runtime.worker import Report

from .gradient_scale import Scale
from .overlapped_pair import Overlapped, in_pairs
from .profiler_ranges import show_ranges
from .replica_routing import Cut
from .scheduler_base import SchedulerBase
from .step import Observer, Step
from .step_contract import Gradients
from .step_messages import Progress
from .step_plan import Rows, StepPlan

__all__ = ["Gradients", "Step", "StepScheduler"]

METHODS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
HERE = Context(grad=True, inference=False, autocasts=())  # the modes of a worker thread
Leaves = Mapping[str, Sequence[Sequence[Tensor]]]  # of each input, by micro-batch


class StepScheduler(SchedulerBase):
    """The base of schedulers that run forward and backward.

    - `schedule`: its name; `rows`: its text, for each worker the label and then the actions.
    - `feeds`: the inputs and the stages that take them.
    - `gradients`: for each stage, the arguments and results that have a gradient.
    - `offloaded`: the stages whose activations are kept in host memory.
    - `loss_reduce`: how the losses of the micro-batches become the loss of the batch, as in `outputs`.
    - `trained`: the name of the loss, if the epilogue computes it.
    - `cuts`: the values that move between stages of different numbers of replicas: name, source, target, and the
      dimension of the samples (None: the value is the same for all samples).
    - `collectives`: for ranks: the kind of each collective, as in `GroupCall`, then for each rank that takes part the
      name of its part, the stage that makes it, and the stage that takes the result.
    """

    schedule: str = ""
    rows: str = ""
    feeds: tuple[tuple[str, int], ...] = ()
    gradients: tuple[Gradients, ...] = ()
    offloaded: tuple[int, ...] = ()
    loss_reduce: str | None = None
    trained: str = ""
    cuts: tuple[Cut, ...] = ()
    collectives: tuple[tuple[str | tuple[str, int, int], ...], ...] = ()

    def __init__(
        self, stages: Sequence[Stage], whole: Stage | None = None, last: Stage | None = None, threads: bool = True
    ) -> None:
        """As `SchedulerBase`; without `threads`, a rank holds this scheduler. Raises PackageError for one that only
        ranks can run."""
        if threads and self.collectives:
            raise PackageError(
                "the stages of this package combine tensors by collectives, such as all-reduce, which need a rank "
                f"for each device: load it over {len(self.workers()) + 1} ranks, or save one from a pipe in one process"
            )
        super().__init__(stages, whole, last, threads)
        labels, schedule = read_rows(self.rows)
        self.timetable: Rows = {
            label: tuple((action, getattr(type(self), f"{METHODS[action.kind]}_{action.stage}")) for action in row)
            for label, row in zip(labels, schedule.devices, strict=True)
        }
        self.methods = {action: method for row in self.timetable.values() for action, method in row}
        self.alone = {self.devices[-1]: tuple((action, self.methods[action]) for action in order(schedule)[0])}
        self.paired, self._paired_alone = (
            {label: in_pairs(row, schedule, type(self)) for label, row in rows.items()}
            for rows in (self.timetable, self.alone)
        )
        self._may_run_alone = bool(self.workers()) and all(stage.device.type == "cpu" for stage in stages)
        self._paces: dict[int, ThreadAutotune] = {}  # by the size of the batch, in powers of two
        forwards = ((action.stage, action.micro_batch) for action in schedule.place if action.kind == "F")
        self.at_once = {(j, i) for j, i in forwards if at_once(schedule, j, i)}
        self.splits = any(action.kind == "W" for action in schedule.place)

    def run(self, batch: Sequence[Any], chunks: int, scale: Scale | None = None) -> tuple[Any, ...]:
        """The outputs, in order, for the inputs, in order, in at most `chunks` micro-batches. Gradients, multiplied by
        `scale`, are added to those of the model and of the inputs; if anything fails, no gradient is added."""
        if not self._may_run_alone:
            return self.step(batch, chunks, scale)
        size = sum(value.numel() for value in batch if isinstance(value, Tensor)).bit_length()
        pace = self._paces.get(size)
        if pace is None:
            pace = self._paces[size] = ThreadAutotune(len(self.alone[self.devices[-1]]))
        alone, start = pace.choose(), perf_counter()
        outputs = self.step(batch, chunks, scale, None, self._paired_alone if alone else None)
        pace.note(alone, perf_counter() - start)
        return outputs

    def step(
        self,
        batch: Sequence[Any],
        chunks: int,
        scale: Scale | None,
        observer: Observer | None = None,
        rows: Rows | None = None,
    ) -> tuple[Any, ...]:
        """`run` under an observer; `rows` replaces the timetable, for another order."""
        m = self.attempt(batch, chunks, scale, observer, rows)
        commit(self.mutating)
        for stage in self._copying:
            stage.give_back()
        outputs, pairs = self.outcome(m, batch)
        commit_gradients(pairs)
        return outputs

    def attempt(
        self,
        batch: Sequence[Any],
        chunks: int,
        scale: Scale | None,
        observer: Observer | None = None,
        rows: Rows | None = None,
    ) -> Step:
        """Run a step, without committing gradients and buffers to the model. Under an observer each action of a pair
        runs by itself, so that it has a time and memory of its own."""
        rows = rows or (self.paired if observer is None else self.timetable)
        self.refresh()
        plans = self.plans(batch, chunks, scale, rows)
        progress = Progress({mailbox for plan in plans for mailbox in plan.mailboxes})
        with Interrupts(progress.stop):
            m = self.take(plans, progress, observer)
            self.check(m)
        return m

    def refresh(self) -> None:
        """Prepare for a step: renew copies of the model's tensors."""
        self.check_open()
        for stage in self._copying:
            stage.refresh()

    def check(self, m: Step) -> None:
        """Raise the first error of a step, if it has failed."""
        if m.context.autocasts:  # the cache would keep casts of the step's aliases until the outermost context ends
            torch.clear_autocast_cache()
        if m.progress.failed:
            discard(self.mutating)
            error = m.progress.failed[0]
            m.progress.failed.clear()
            try:
                raise error
            finally:
                del error  # else the error and this frame refer to each other, and keep the stages' tensors alive

    def plans(self, batch: Sequence[Any], chunks: int, scale: Scale | None, rows: Rows) -> list[StepPlan]:
        """What is decided before a step; with replicas, for the step of each worker. Stages have the mailbox of their
        worker. If one thread runs all rows, all stages share its mailbox."""
        made = {label: Mailbox(self.check_alive) for label in rows}
        mailboxes = [made.get(label) or made[self.devices[-1]] for label in self.devices]
        own = range(len(self.stages))
        return [StepPlan(self, self.place, self.scatter(batch, chunks), own, rows, mailboxes, scale)]

    def take(self, plans: Sequence[StepPlan], progress: Progress, observer: Observer | None) -> Step:
        """Run a step, with aliases in the stages for the tensors that need a gradient. With replicas, this gives the
        step of the calling thread."""
        with standing_in(self.stages) as pairs:
            m = Step(plans[0], pairs, progress)
            self.begin([m], observer)
            self.run_rows(m)
        return m

    def begin(self, steps: Sequence[Step], observer: Observer | None) -> None:
        """Make the steps of all workers ready."""
        for step in steps:
            step.begin(observer)
            show_ranges(step)
        if observer is None and all(step.by_code for step in steps):  # so the rows run without gradients
            for step in steps:
                step.compute_directly()

    def outcome(self, m: Step, batch: Sequence[Any]) -> tuple[tuple[Any, ...], list[Pair]]:
        """The outputs of the batch, and the pairs of tensors and aliases with all gradients."""
        outputs = tuple([x.detach() if isinstance(x, Tensor) else x for x in self.results(m)])
        pairs = put_together([pair for pairs in m.pairs for pair in pairs], self.stages)
        return outputs, [*pairs, *self.input_pairs(m.leaves, batch)]

    def results(self, m: Step) -> tuple[Any, ...]:
        """What a step returns: outputs of all micro-batches, joined, and what the epilogue has computed."""
        outputs = self.gather(m, taken=False)
        return (*outputs, *m.epilogue.values) if self.epilogue[0] else outputs

    def run_rows(self, m: Step) -> None:
        """Let every worker run its row; return when all are done or have stopped."""
        reports: SimpleQueue[Report] = SimpleQueue()
        workers = self.worker_steps(m)
        ours = workers.pop(self.devices[-1])
        begun: list[str] = []
        try:
            if workers:
                self.wake()
            for label, (own, j) in workers.items():
                self._workers[label].orders.put((self._work, own, (j, j), HERE, None, reports))
                begun.append(label)
            self._row(*ours)
        except BaseException as error:  # the second Ctrl-C
            m.progress.stop(error)
        if begun:
            self._await(begun, reports, m)
        if len(m.progress.done) < len(begun):
            try:
                self.check_alive()
            except RuntimeError as error:
                m.progress.stop(error)

    def worker_steps(self, m: Step) -> dict[str, tuple[Step, int]]:
        """For each worker that has a row, by its label: its step, and a stage that it runs."""
        return {label: (m, j) for j, label in enumerate(self.devices) if label in m.plan.rows}

    def _await(self, workers: Sequence[str], reports: SimpleQueue[Report], m: Step) -> None:
        """Wait until all these workers are done, or gone. Ctrl-C may lose a report that is out of the queue and not
        returned yet, so a report only wakes this thread; `m.progress` says who is done."""
        done = m.progress.done
        while True:
            try:
                if all(label in done or not self._workers[label].thread.is_alive() for label in workers):
                    return
                reports.get(timeout=LIVENESS_POLL)
            except Empty:
                continue
            except BaseException as error:  # the second Ctrl-C
                m.progress.stop(error)

    def _work(self, m: Step, j: int) -> None:
        """Run the row of the worker of stage j, in the caller's modes."""
        try:
            with m.context.enter():
                self._row(m, j)
        except BaseException as error:
            m.progress.stop(error)
        finally:
            m.progress.done.append(m.devices[j])

    def _row(self, m: Step, j: int) -> None:
        """Run the row of the worker of stage j, or all rows: then each action of each replica."""
        row, failed, step = m.plan.rows[self.devices[j]], m.progress.failed, m
        steps = m.views if m.plan.alone and m.views is not None else ((m,),) * len(self.stages)
        by_code = all(one.by_code for one in chain(*steps))
        action = method = None
        try:
            with use_stream(m.compute[j]), torch.no_grad() if by_code else nullcontext():
                for action, method in row:
                    _, stage, i = action
                    for step in steps[stage]:
                        if i <= step.last:
                            if failed:
                                return
                            method(self, step, i)
        except Stopped:
            return
        except BaseException as error:
            if isinstance(method, Overlapped):
                action = method.failed(error, step)
            if action is not None:
                self.add_notes(error, step, action.stage, action.micro_batch, step.plan.replica, action.kind != "F")
            m.progress.stop(error)

    def input_pairs(self, leaves: Leaves, batch: Sequence[Any]) -> list[Pair]:
        """The inputs that the loss depends on, with aliases that hold their gradients, collected from the stages'
        leaves. Other inputs get no gradient, as in autograd: to an optimizer None is not the same as zeros."""
        pairs = []
        for value, (name, dim) in zip(batch, self.inputs, strict=True):
            if any(leaf.grad is not None for some in leaves.get(name, ()) for leaf in some):
                pieces = [_sum([leaf.grad for leaf in some], some[0]) for some in leaves[name]]
                whole = alias(value)
                pieces = [piece.to(pieces[0].device) for piece in pieces]  # replicas may be on several
                found = torch.stack(pieces).sum(0) if dim is None else torch.cat(pieces, dim)
                whole.grad = found.to(value.device)
                pairs.append((value, whole))
        return pairs


def _sum(grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """The sum of the gradients of an input's users, which may be on several devices."""
    found = [grad.to(like.device) for grad in grads if grad is not None]
    return torch.stack(found).sum(0) if found else torch.zeros_like(like)


def read_rows(text: str) -> tuple[tuple[str, ...], Schedule]:
    """The workers' labels, and their actions.

    >>> labels, schedule = read_rows("cpu:0  0F0 0F1\\n       0B0 0B1\\ncpu:1  1F0 1B0 1F1 1B1")
    >>> for label, row in zip(labels, schedule.devices):
    ...     print(label, *row)
    cpu:0 0F0 0F1 0B0 0B1
    cpu:1 1F0 1B0 1F1 1B1
    """
    words: dict[str, list[str]] = {}
    for word in text.split():
        if re.fullmatch(r"\d*[A-Z]\d+\+?", word):
            words[next(reversed(words))].append(word)
        else:
            words[word] = []
    return tuple(words), parse("\n".join(" ".join(row) for row in words.values()))
