"""What happened on each device and each link, measured or simulated: spans of time, and memory over time.

The simulator and a measured run give the same type, so the same code draws both, and `compare` sets them side by side.

    gpipe: 12 ms, bubble 25.0%
    device    busy   idle   peak memory
    device 0  9 ms   3 ms   12 MB
    device 1  9 ms   3 ms   8 MB
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tabulate import tabulate

from fxpipe.ir.schedule.schedule import KINDS as ACTIONS
from fxpipe.ir.schedule.schedule import Costs, Schedule, starts

from .dataclass_json import read, write
from .drawable import Drawable
from .units import show_bytes, show_seconds

KINDS = ACTIONS | {"R": "recompute", "T": "transfer", "A": "all-reduce"}


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a device or link did.

    - `where`: the device or link.
    - `start`, `end`: in seconds.
    - `kind`: a key of `KINDS`.
    - `label`: anything more to say, such as the names of the values that moved.
    """

    where: str
    start: float
    end: float
    kind: str
    stage: int
    micro_batch: int
    label: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        what = f"{KINDS[self.kind]} of stage {self.stage}, micro-batch {self.micro_batch}"
        return f"{what}, {show_seconds(self.start)} to {show_seconds(self.end)}"


Steps = tuple[tuple[float, int], ...]  # (seconds, bytes from then on), ascending

# What the memory of a timeline counts: the allocated memory of an accelerator; what a CPU worker keeps for backward;
# that and parameters with their gradients.
PEAK, KEPT, WITH_PARAMETERS = "peak memory", "kept for backward", "memory with parameters and gradients"


@dataclass(frozen=True)
class Timeline(Drawable):
    """What happened when in one training step, simulated or measured. Print with `str`.

    - `name`: of the schedule.
    - `spans`: what `devices` and `links` (their labels) did, in any order, each with `start` and `end` in seconds.
    - `memory`: per device pairs (seconds, bytes in use from then on), one pair if only the maximum is known, as of
      an accelerator that was measured; empty if nothing is known.
    - `call`: when the call of the step began and ended, if it was measured: before the first span its batch is cut,
      after the last one its gradients are added to the model's.
    - `counts`: what `memory` counts.
    """

    name: str
    devices: tuple[str, ...]
    spans: tuple[Span, ...]
    links: tuple[str, ...] = ()
    memory: tuple[Steps, ...] = ()
    call: tuple[float, float] | None = None
    counts: str = PEAK

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    @cached_property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @property
    def window(self) -> tuple[float, float]:
        """The start and end of the whole step: of its call, if that was measured, else of its spans."""
        start, end = self.call or (self.start, self.end)
        return min(start, self.start), max(end, self.end)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each device computes."""
        total = dict.fromkeys(self.devices, 0.0)
        for span in self.spans:
            if span.where in total:
                total[span.where] += span.seconds
        return tuple(total.values())

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each device waits, from the first start on any device to the last end."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the devices' time, from the first start to the last end, that is `idle`."""
        return 1 - sum(self.busy) / (self.makespan * len(self.devices)) if self.makespan else 0.0

    @cached_property
    def high_water(self) -> tuple[int, ...]:
        """The most bytes that each device had in use, as in `memory`; empty if that is not known."""
        return tuple(max((held for _, held in steps), default=0) for steps in self.memory)

    def on(self, where: str) -> tuple[Span, ...]:
        """The spans of a device or link, by start."""
        return self._rows.get(where, ())

    @cached_property
    def _rows(self) -> dict[str, tuple[Span, ...]]:
        rows: dict[str, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            rows.setdefault(span.where, []).append(span)
        return {where: tuple(row) for where, row in rows.items()}


def with_memory_of(timeline: Timeline, counted: Timeline) -> Timeline:
    """The timeline with the memory of `counted`, another run of the same step. If that was counted when each action of
    a device began and ended, it moves to when they do so here; else only the peak is known."""
    found, memory = [], dict(zip(counted.devices, counted.memory, strict=True))
    for device in timeline.devices:
        moments = [at for span in timeline.on(device) for at in (span.start, span.end)]
        held = [amount for _, amount in memory[device]]
        same = len(moments) == len(held) and _actions(timeline, device) == _actions(counted, device)
        found.append(tuple(zip(moments, held, strict=True)) if same else ((timeline.start, max(held, default=0)),))
    return replace(timeline, memory=tuple(found), counts=counted.counts)


def _actions(timeline: Timeline, device: str) -> list[tuple[str, int, int]]:
    return [(span.kind, span.stage, span.micro_batch) for span in timeline.on(device)]


def even(schedule: Schedule, costs: Costs | None = None, labels: Sequence[str] = ()) -> Timeline:
    """The timeline of a schedule whose stages are alike and whose values move in no time: what its picture shows. One
    unit of `costs` becomes one second."""
    each = costs or Costs()
    devices = tuple(labels) or tuple(f"device {device}" for device in range(len(schedule.devices)))
    spans = (
        Span(devices[schedule.place[action][0]], start, start + each.of(action.kind), *action)
        for action, start in starts(schedule, each).items()
    )
    return Timeline(schedule.name, devices, tuple(sorted(spans, key=lambda span: (span.start, span.where))))


def check(timeline: Timeline) -> None:
    """Raise ValueError if a span ends before it starts, if its device or link is unknown, or if a device does two
    things at once."""
    known = {*timeline.devices, *timeline.links}
    for span in timeline.spans:
        if span.kind not in KINDS or span.where not in known:
            raise ValueError(f"a span of kind {span.kind!r} on {span.where!r}, which the timeline does not have")
        if not span.start <= span.end:
            raise ValueError(f"on {span.where}, a span ends before it starts: {span}")
    slack = 1e-9 * timeline.makespan  # sums of floating-point durations
    for device in timeline.devices:
        for before, after in pairwise(timeline.on(device)):
            if after.start < before.end - slack:
                raise ValueError(f"{device} does two things at once: {before}; {after}")
    if len(timeline.memory) not in (0, len(timeline.devices)):
        raise ValueError(f"memory of {len(timeline.memory)} devices, for {len(timeline.devices)}")


def show(timeline: Timeline) -> str:
    """A table with a line per device."""
    head = f"{timeline.name}: {show_seconds(timeline.makespan)}, bubble {timeline.bubble:.1%}"
    rows = [
        [device, show_seconds(busy), show_seconds(idle), peak]
        for device, busy, idle, peak in zip(
            timeline.devices, timeline.busy, timeline.idle, _peaks(timeline), strict=True
        )
    ]
    return f"{head}\n{_table(rows, ['device', 'busy', 'idle', timeline.counts])}"


def _peaks(timeline: Timeline) -> list[str]:
    known = timeline.high_water or (None,) * len(timeline.devices)
    return ["-" if held is None else show_bytes(held) for held in known]


def compare(predicted: Timeline, measured: Timeline) -> str:
    """A table of what was predicted and what was measured on the same devices; `off` is the error of the prediction, in
    percent of the measurement."""
    if len(predicted.devices) != len(measured.devices):
        raise ValueError(f"cannot compare {len(predicted.devices)} devices with {len(measured.devices)}")
    rows = [
        _beside("step", predicted.makespan, measured.makespan),
        ["bubble", f"{predicted.bubble:.1%}", f"{measured.bubble:.1%}", ""],
    ]
    for device, *busy in zip(measured.devices, predicted.busy, measured.busy, strict=True):
        rows.append(_beside(f"{device} busy", *busy))
    if predicted.memory and measured.memory:
        for device, *held in zip(measured.devices, predicted.high_water, measured.high_water, strict=True):
            rows.append([f"{device} {measured.counts}", *map(show_bytes, held), _off(*held)])
    return _table(rows, ["", "predicted", "measured", "off"])


def _beside(name: str, predicted: float, measured: float) -> list[str]:
    return [name, show_seconds(predicted), show_seconds(measured), _off(predicted, measured)]


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""


def _table(rows: Iterable[Sequence[str]], headers: Sequence[str]) -> str:
    table = tabulate(rows, headers, tablefmt="plain", disable_numparse=True)
    return "\n".join(line.rstrip() for line in table.splitlines())


def dump(timeline: Timeline) -> str:
    """The timeline as JSON text, one span per line; `load` reads it back."""
    return write(timeline)


def load(text: str) -> Timeline:
    """The timeline that `dump` wrote. Raises ValueError for text that is not one."""
    return read(Timeline, text)
