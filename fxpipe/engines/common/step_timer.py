"""Records when each action of a step began and ended: the timeline of a real run, in the form of a simulated one.

On the CPU the worker reads its clock. An accelerator works asynchronously, so events are recorded in its stream and
read after the step; their times count from an event that is recorded on each when the step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.timeline import KEPT, PEAK, Span, Steps, Timeline
from fxpipe.runtime.accelerator import has_streams
from fxpipe.runtime.autograd.offload import Offload
from fxpipe.runtime.autograd.saved_tensors import Saved
from fxpipe.runtime.autograd.transfer import Transfer
from fxpipe.runtime.streams import use_stream, wait_stream

from .gradient_scale import Scale
from .step import Step, wrap
from .step_contract import ACTIONS
from .step_engine import StepScheduler

Moment = float | torch.Event
# a device or a link between two, the device with the clock, kind, stage, micro-batch, start, end, label
Note = tuple[str, torch.device, str, int, int, Moment, Moment, str]


def take_step(
    scheduler: StepScheduler,
    batch: Sequence[Any],
    chunks: int,
    scaler: torch.amp.GradScaler | None,
    accumulate: int,
    timeline: bool,
) -> tuple[tuple[Any, ...], Timeline | None]:
    """Run a step, with gradients multiplied by the scaler's scale and divided by `accumulate`. Returns the outputs, and
    the timeline if `timeline` is set, else None."""
    scale = Scale(accumulate=accumulate) if accumulate > 1 else None
    if scaler is not None:
        scale = Scale(scaler.scale(torch.ones((), device=scheduler.stages[-1].device)), accumulate)
    if not timeline:
        return scheduler.run(batch, chunks, scale), None
    timer = StepTimer()
    return scheduler.step(batch, chunks, scale, timer), timer.timeline(scheduler.schedule)


class StepTimer:
    """The notes of one step, of all workers.

    - `homes`: the torch device of each worker; `saved`: the bytes that autograd and recomputations keep there, and
      `curves` those bytes when each action began and ended.
    - `takes`: the tensors kept for recomputations, by worker, stage and micro-batch.
    - `called`: when the timer was made, at the beginning of the call.
    - `started`: when the step began; `called` until then. `anchors`: for each accelerator the event of that moment.
    """

    def __init__(self) -> None:
        self.called = self.started = perf_counter()
        self.notes: list[Note] = []
        self.homes: dict[str, torch.device] = {}
        self.saved: dict[str, Saved] = {}
        self.curves: dict[str, list[tuple[Moment, int]]] = {}
        self.takes: dict[tuple[str, int, int], Any] = {}
        self.anchors: dict[torch.device, Any] = {}

    def begin(self, m: Step) -> None:
        own = [stand_in for pairs in m.pairs for _, stand_in in pairs]
        own += [held[name] for j in m.plan.own for held, name in m.stages[j].slots if isinstance(held[name], Tensor)]
        pieces = [x for micro_batch in m for x in vars(micro_batch).values() if isinstance(x, Tensor)]
        for j in m.plan.own:
            self.homes[m.devices[j]] = m.stages[j].device
            # All stages of a device share one count; tensors that are moved to the host do not count.
            saved = self.saved.setdefault(m.devices[j], Saved(own, pieces))
            if not isinstance(m.hooks[j], Offload):
                m.hooks[j] = saved
        actions = {name: partial(self.action, kind) for name, kind in ACTIONS.items()}
        wrap(m, {**actions, "pack": self.pack, "open": self.open})
        for device in set(filter(has_streams, self.homes.values())) - self.anchors.keys():
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
            self.anchors[device] = moment(device)
        self.started = perf_counter()

    def action(self, kind: str, m: Step, run: Callable[..., Any], j: int, i: int, *args: Any) -> Any:
        """Run an action of stage j on micro-batch i, and note its times."""
        if kind == "R" and m.kept[j, i].results is not None:
            return None
        label, device = m.devices[j], m.stages[j].device
        saved = self.saved[label]
        saved.peak = saved.now  # from here on, of this action
        start = moment(device)
        results = run(m, j, i, *args)
        end = moment(device)
        self.notes.append((label, device, kind, j, i, start, end, ""))
        if kind == "F" and m.kept[j, i].results is None:
            self.takes[label, j, i] = [saved.keep(x) for x in args if isinstance(x, Tensor)]
        elif kind == "R":
            del self.takes[label, j, i]
        self.curves.setdefault(label, []).extend(((start, saved.peak), (end, saved.now)))
        return results

    def pack(
        self,
        m: Step,
        pack: Callable[..., Transfer],
        value: Tensor,
        j: int,
        i: int,
        target: int,
        name: str,
        grad: bool,
        there: Step,
    ) -> Transfer:
        """Send a tensor to another device; note the times of a copy to an accelerator."""
        here, goal = value.device, there.stages[target].device
        if goal.type == "cpu":
            return pack(m, value, j, i, target, name, grad, there)
        # Between accelerators the copy runs on a stream of the sender.
        stream, device = (m.streams[j, i], here) if has_streams(here) else (there.streams[target, i], goal)
        if has_streams(here):
            wait_stream(stream, m.compute[j])
        with use_stream(stream):
            start = moment(device)
        parcel = pack(m, value, j, i, target, name, grad, there)
        with use_stream(stream):
            end = moment(device)
        link = f"{m.devices[j]} -> {there.devices[target]}"
        self.notes.append((link, device, "T", j, i, start, end, name))
        return parcel

    def open(self, m: Step, open: Callable[..., Tensor], parcel: Transfer, j: int, i: int, name: str) -> Tensor:
        """Take a tensor from another device; note the times of a copy to the CPU."""
        start = perf_counter()
        value = open(m, parcel, j, i, name)
        if parcel.device.type == "cpu":
            link = f"{parcel.tensor.device} -> {m.devices[j]}"
            self.notes.append((link, parcel.device, "T", j, i, start, perf_counter(), name))
        return value

    def timeline(self, name: str) -> Timeline:
        """The timeline of the step, whose call ends now, in seconds from its beginning."""
        labels = tuple(self.homes)
        for device in self.anchors:
            torch.accelerator.synchronize(device)
        call = self.called - self.started, perf_counter() - self.started

        def seconds(device: torch.device, at: Moment) -> float:
            return at - self.started if isinstance(at, float) else self.anchors[device].elapsed_time(at) / 1e3

        spans = tuple(
            Span(where, seconds(device, start), seconds(device, end), kind, j, i, text)
            for where, device, kind, j, i, start, end, text in self.notes
        )
        links = tuple(sorted({span.where for span in spans} - set(labels)))

        def memory(label: str, device: torch.device) -> Steps:
            if has_streams(device):
                return ((0.0, torch.accelerator.max_memory_allocated(device)),)
            return tuple((seconds(device, at), held) for at, held in self.curves.get(label, ()))

        steps = tuple(memory(label, device) for label, device in self.homes.items())
        counts = PEAK if any(map(has_streams, self.homes.values())) else KEPT
        return Timeline(name, labels, spans, links, steps, call, counts)


def moment(device: torch.device) -> Any:
    """The present moment: seconds of the host's clock on the CPU, an event on an accelerator's current stream."""
    if not has_streams(device):
        return perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
