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

from fxpipe.ir.timeline import Span, Steps, Timeline
from fxpipe.runtime.offload import Offload
from fxpipe.runtime.saved import Saved

from .step import Step, Stepper

Moment = float | torch.cuda.Event
Note = tuple[str, str, int, int, Moment, Moment, str]  # where, kind, stage, micro-batch, start, end, label


def take_step(
    scheduler: Stepper, batch: Sequence[Any], chunks: int, scaler: torch.amp.GradScaler | None, timeline: bool
) -> tuple[tuple[Any, ...], Timeline | None]:
    """The outputs of a step, gradients multiplied by the scaler's scale, and when what ran, if that is asked for."""
    scale = None if scaler is None else scaler.scale(torch.ones((), device=scheduler.stages[-1].device))
    if not timeline:
        return scheduler.step(batch, chunks, scale, Step)[0], None
    outputs, done = scheduler.step(batch, chunks, scale, TimedStep)
    return outputs, done.timeline(scheduler.schedule)


class TimedStep(Step):
    """A step under way, with notes."""

    def begin(self, engine: Stepper, *args: Any) -> None:
        self.notes: list[Note] = []
        devices = {stage.device for stage in engine.stages if stage.device.type == "cuda"}
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
        self.saved = {label: Saved(aliases) for label in self.engine.devices}
        made = zip(super().make_hooks(), self.engine.devices, strict=True)
        return [hooks if isinstance(hooks, Offload) else self.saved[label] for hooks, label in made]

    def forward(self, j: int, i: int, *args: Any) -> Any:
        with self.noted("F", j, i):
            return super().forward(j, i, *args)

    def forward_to_recompute(self, j: int, i: int, *args: Any) -> Any:
        with self.noted("F", j, i):
            results = super().forward_to_recompute(j, i, *args)
        saved = self.saved[self.engine.devices[j]]
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

    @contextmanager
    def noted(self, kind: str, j: int, i: int) -> Iterator[None]:
        """What runs inside is an action of stage j on micro-batch i."""
        device = self.stages[j].device
        start = moment(device)
        yield
        self.notes.append((self.engine.devices[j], kind, j, i, start, moment(device), ""))

    def timeline(self, name: str) -> Timeline:
        """What happened, in seconds from the beginning."""
        labels = tuple(dict.fromkeys(self.engine.devices))
        home = {label: stage.device for label, stage in zip(self.engine.devices, self.stages, strict=True)}
        for device in self.anchors:
            torch.cuda.synchronize(device)

        def seconds(label: str, at: Moment) -> float:
            if isinstance(at, float):
                return at - self.started
            anchor = self.anchors[home[label]]
            return float(anchor.elapsed_time(at)) / 1e3

        spans = tuple(
            Span(label, seconds(label, start), seconds(label, end), kind, j, i, text)
            for label, kind, j, i, start, end, text in self.notes
        )
        return Timeline(name, labels, spans, (), tuple(self.memory(label, home[label]) for label in labels))

    def memory(self, label: str, device: torch.device) -> Steps:
        """The high-water mark: of a GPU its own, of a CPU worker what backward needed at once."""
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else self.saved[label].peak
        return ((0.0, peak),)


def moment(device: torch.device) -> Any:
    """Now, as the device sees it."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
