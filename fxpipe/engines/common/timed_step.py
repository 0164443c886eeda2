"""A step that notes when each action began and ended: the timeline of a real run, in the form of a simulated one.

On the CPU the worker's own clock is read. A GPU works behind the worker's back, so events are put into its stream, and
read when all is done; they count from an event that every GPU gets at the moment when the step begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.local.replica_step import ReplicaStep, ReplicatedScheduler
from fxpipe.ir.timeline import Span, Steps, Timeline
from fxpipe.runtime.autograd.offload import Offload
from fxpipe.runtime.autograd.saved_tensors import Saved
from fxpipe.runtime.autograd.transfer import Transfer
from fxpipe.runtime.streams import use_stream, wait_stream

from .step import Scale, Step, StepEngine
from .step_engine import StepScheduler

Moment = float | torch.cuda.Event
# where (a device, or a link between two), whose clock, kind, stage, micro-batch, start, end, label
Note = tuple[str, torch.device, str, int, int, Moment, Moment, str]


def take_step(
    scheduler: StepScheduler,
    batch: Sequence[Any],
    chunks: int,
    scaler: torch.amp.GradScaler | None,
    accumulate: int,
    timeline: bool,
) -> tuple[tuple[Any, ...], Timeline | None]:
    """The outputs of a step, gradients multiplied by the scaler's scale and divided by `accumulate`, and when what ran,
    if that is asked for."""
    scale: Scale = 1 / accumulate if accumulate > 1 else None
    if scaler is not None:
        scale = scaler.scale(torch.ones((), device=scheduler.stages[-1].device)) / accumulate
    if not timeline:
        return scheduler.run(batch, chunks, scale), None
    kind = TimedReplicaStep if isinstance(scheduler, ReplicatedScheduler) else TimedStep
    outputs, done = scheduler.step(batch, chunks, scale, kind)
    return outputs, done.timeline(scheduler.schedule)


class TimedStep(Step):
    """A step under way, with notes."""

    def begin(self, engine: StepEngine, *args: Any) -> None:
        self.notes: list[Note] = []
        devices = {stage.device for stage in self.stages if stage.device.type == "cuda"}
        for device in devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self.anchors = {device: moment(device) for device in devices}
        self.takes: dict[tuple[int, int], Any] = {}
        super().begin(engine, *args)
        self.started = perf_counter()

    def make_hooks(self) -> list[Saved | Offload | None]:
        """One count for all stages of a device, of what is not moved to the host."""
        aliases = [stand_in for pairs in self.pairs for _, stand_in in pairs]
        self.saved = {label: Saved(aliases) for label in self.devices}
        made = zip(super().make_hooks(), self.devices, strict=True)
        return [hooks if isinstance(hooks, Offload) else self.saved[label] for hooks, label in made]

    def forward(self, j: int, i: int, *args: Any) -> Any:
        with self.noted("F", j, i):
            return super().forward(j, i, *args)

    def forward_to_recompute(self, j: int, i: int, *args: Any) -> Any:
        if (j, i) in self.engine.at_once:
            return self.forward(j, i, *args)
        with self.noted("F", j, i):
            results = super().forward_to_recompute(j, i, *args)
        saved = self.saved[self.devices[j]]
        self.takes[j, i] = [saved.keep(x) for x in args if isinstance(x, Tensor)]
        return results

    def recompute(self, j: int, i: int) -> None:
        if self.kept[j, i].results is None:
            with self.noted("R", j, i):
                super().recompute(j, i)
            del self.takes[j, i]

    def backward(self, j: int, i: int, *grads: Tensor | None) -> Any:
        with self.noted("B", j, i):
            return super().backward(j, i, *grads)

    def input_gradient(self, j: int, i: int, *grads: Tensor | None) -> Any:
        with self.noted("I", j, i):
            return super().input_gradient(j, i, *grads)

    def weight_gradient(self, j: int, i: int) -> None:
        with self.noted("W", j, i):
            super().weight_gradient(j, i)

    def pack(self, value: Tensor, j: int, i: int, target: int, name: str, grad: bool, there: Step) -> Transfer:
        here, goal = value.device, there.stages[target].device
        if goal.type == "cpu":
            return super().pack(value, j, i, target, name, grad, there)
        # Between GPUs the copy runs on a stream of the one that sends.
        stream, device = (self.streams[j, i], here) if here.type == "cuda" else (there.streams[target, i], goal)
        if here.type == "cuda":
            wait_stream(stream, self.compute[j])
        with use_stream(stream):
            start = moment(device)
        parcel = super().pack(value, j, i, target, name, grad, there)
        with use_stream(stream):
            end = moment(device)
        link = f"{self.devices[j]} -> {there.devices[target]}"
        self.notes.append((link, device, "T", j, i, start, end, name))
        return parcel

    def open(self, parcel: Transfer, j: int, i: int, name: str) -> Tensor:
        if parcel.device.type != "cpu":
            return super().open(parcel, j, i, name)
        start = perf_counter()
        value = super().open(parcel, j, i, name)
        link = f"{parcel.tensor.device} -> {self.devices[j]}"
        self.notes.append((link, parcel.device, "T", j, i, start, perf_counter(), name))
        return value

    @contextmanager
    def noted(self, kind: str, j: int, i: int) -> Iterator[None]:
        """What runs inside is an action of stage j on micro-batch i."""
        device = self.stages[j].device
        start = moment(device)
        yield
        self.notes.append((self.devices[j], device, kind, j, i, start, moment(device), ""))

    def timeline(self, name: str) -> Timeline:
        """What happened, in seconds from the beginning."""
        home = self.homes()
        labels = tuple(home)
        for device in self.anchors:
            torch.cuda.synchronize(device)

        def seconds(device: torch.device, at: Moment) -> float:
            return at - self.started if isinstance(at, float) else self.anchors[device].elapsed_time(at) / 1e3

        spans = tuple(
            Span(where, seconds(device, start), seconds(device, end), kind, j, i, text)
            for where, device, kind, j, i, start, end, text in self.notes
        )
        links = tuple(sorted({span.where for span in spans} - set(labels)))
        return Timeline(name, labels, spans, links, tuple(self.memory(label, home[label]) for label in labels))

    def homes(self) -> dict[str, torch.device]:
        """The torch device of each worker."""
        return {label: stage.device for label, stage in zip(self.devices, self.stages, strict=True)}

    def memory(self, label: str, device: torch.device) -> Steps:
        """The high-water mark: of a GPU its own, of a CPU worker what backward needed at once."""
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else self.saved[label].peak
        return ((0.0, peak),)


class TimedReplicaStep(ReplicaStep, TimedStep):
    """The same as one of several workers sees it; all write into the notes of the first."""

    def begin(self, engine: StepEngine, *args: Any) -> None:
        super().begin(engine, *args)
        first = next(iter(self.team.values()))
        assert isinstance(first, TimedReplicaStep)
        first.saved[self.label] = self.saved[self.label]
        self.notes, self.anchors, self.started, self.saved = first.notes, first.anchors, first.started, first.saved

    def homes(self) -> dict[str, torch.device]:
        replica_groups = zip(self.engine.labels, self.engine.replica_groups, strict=True)
        return {
            label: stage.device for replica_group in replica_groups for label, stage in zip(*replica_group, strict=True)
        }


def moment(device: torch.device) -> Any:
    """Now, as the device sees it."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
