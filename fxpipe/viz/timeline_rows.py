"""The rows of a timeline's picture: a row per device with a box for each thing that it did, its memory below, and below
all rows, thinner, the links between devices. Time goes to the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from fxpipe.ir.timeline import KINDS, Span, Steps, Timeline
from fxpipe.ir.units import show_bytes, show_seconds

from .svg_elements import ink_on, shade, tag, text_width, words

ROW, GAP, STRIP, LANE = 30.0, 8.0, 22.0, 9.0  # heights: device row, between rows, memory, link
PADDING = 2.0  # pixels of a box beside its number
SHARES = 76.0  # pixels to the right of the time axis


@dataclass(frozen=True)
class Window:
    """A part of the step, in seconds, that is drawn from `left` on. `name` is empty if it is the whole step."""

    start: float
    end: float
    left: float
    name: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def shows(self, span: Span) -> bool:
        """Whether the span is in the window, or so much of it that it can be seen."""
        seen = min(span.end, self.end) - max(span.start, self.start)
        return self.start <= span.start <= span.end <= self.end or seen > self.seconds / 500


@dataclass(frozen=True)
class Frame:
    """The time axis of rows, from `left` on.

    - `windows`: the parts of the step that are drawn, in order.
    - `scale`: pixels per second.
    - `seconds`: whether times are seconds, not the units of a schedule.
    - `chunks`: how many micro-batches there are, for shades.
    - `stages`: whether boxes show their stage.
    - `named`: whether boxes show the label of what was done, because there is only one micro-batch.
    """

    timeline: Timeline
    left: float
    width: float
    windows: tuple[Window, ...]
    scale: float
    seconds: bool
    chunks: int
    stages: bool
    named: bool

    def time(self, at: float) -> str:
        """A time as it is written."""
        return show_seconds(at) if self.seconds else f"{at:g}"


def left_of(timeline: Timeline) -> float:
    """Where rows begin, right of the names of devices and links."""
    names = [*map(text_width, timeline.devices), *(text_width(name, 9.5) for name in timeline.links)]
    return 24 + max(names, default=0.0) + 12


def whole(timeline: Timeline, seconds: bool, stages: bool, left: float, width: float) -> Frame:
    """The frame of all of a step."""
    scale = width / timeline.makespan if timeline.makespan else 0.0
    chunks = 1 + max((span.micro_batch for span in timeline.spans), default=0)
    named = chunks == 1 and any(span.label for span in timeline.spans if span.kind == "F")
    windows = (Window(timeline.start, timeline.end, left),)
    return Frame(timeline, left, width, windows, scale, seconds, chunks, stages, named)


def rows(frame: Frame, top: float, memory: bool = True) -> tuple[list[str], float]:
    """The rows and the time axis, and the y of the axis."""
    timeline, y = frame.timeline, top
    body: list[str] = []
    for device, name in enumerate(timeline.devices):
        steps = timeline.memory[device] if memory and timeline.memory else ()
        body += _device(frame, device, y)
        if steps:
            body += memory_strip(frame, steps, y + ROW + 4)
        if len(frame.windows) > 1 and timeline.on(name):
            body += _left_out(frame, y + ROW / 2)
        y += ROW + (STRIP + 4 if steps else 0) + GAP
    y += 4 if timeline.links else 0
    for link in timeline.links:
        body += _link(frame, link, y)
        y += LANE + 5
    return [*axis(frame, top, y), *body], y


def _device(frame: Frame, device: int, y: float) -> Iterator[str]:
    timeline, name = frame.timeline, frame.timeline.devices[device]
    share = timeline.busy[device] / timeline.makespan if timeline.makespan else 0.0
    middle = y + ROW / 2 + 4.3
    yield words(name, frame.left - 12, middle, text_anchor="end")
    for window in frame.windows:
        yield from _track(frame, window, y, ROW, 4)
        for span in filter(window.shows, timeline.on(name)):
            yield from _box(frame, window, span, y, ROW)
    yield words(f"{share:.0%}", frame.left + frame.width + 52, middle, text_anchor="end")


def _track(frame: Frame, window: Window, y: float, height: float, rx: int) -> Iterator[str]:
    wide = window.seconds * frame.scale if window.name else frame.width
    yield tag("rect", x=window.left, y=y, width=wide, height=height, rx=rx, class_="track")


def _box(frame: Frame, window: Window, span: Span, y: float, height: float) -> Iterator[str]:
    """A box with a small gap to the next, its micro-batch if there is room, and a text shown on pointing at it."""
    color = shade(span.kind, span.micro_batch / (frame.chunks - 1) if frame.chunks > 1 else 0.5)
    start, end = max(span.start, window.start), min(span.end, window.end)
    x = window.left + (start - window.start) * frame.scale + 0.5
    wide = max((end - start) * frame.scale - 1, 0.6)
    told = f"{KINDS[span.kind]} {span.label}" if frame.named else f"{span}: {span.label}" if span.label else str(span)
    hint = tag("title", escape(told, quote=False))
    yield tag("rect", hint, x=x, y=y, width=wide, height=height, rx=min(3.0, wide / 4), fill=color)
    text, below = str(span.micro_batch), str(span.stage) if frame.stages else ""
    if frame.named:
        text, below = span.label, ""
    tries = [(size, below, small) for size, small in ((12, 8), (10, 8), (8, 6.5))]
    tries += [(size, "", 0) for size, _, _ in tries if below]  # without its stage, if there is no room for both
    fits = [one for one in tries if text_width(text, one[0]) + _lower_width(*one[1:]) + PADDING <= wide]
    if height >= ROW and fits:
        size, below, small = fits[0]
        lower = tag("tspan", below, dy=3, font_size=small) if below else ""
        both = text_width(text, size) + _lower_width(below, small)  # not every program centres a text of two sizes
        at, anchor = (x + (wide - both) / 2, None) if below else (x + wide / 2, "middle")
        style = {"text_anchor": anchor, "fill": ink_on(color), "pointer_events": "none"}
        yield tag("text", text + lower, x=at, y=y + height / 2 + 0.36 * size, font_size=size, **style)


def _lower_width(text: str, size: float) -> float:
    """The width of a small number beside another; some fonts have wider digits than `text_width` says."""
    return text_width(text, size) + 1.5 if text else 0.0


def _left_out(frame: Frame, y: float) -> Iterator[str]:
    """Dots where time is left out between windows."""
    for window, after in zip(frame.windows, frame.windows[1:], strict=False):
        x = window.left + window.seconds * frame.scale
        style = {"class_": "line-stroke", "stroke_width": "2", "stroke_dasharray": "2 5"}
        yield tag("line", x1=x + 10, y1=y, x2=after.left - 10, y2=y, **style)


def memory_strip(frame: Frame, steps: Steps, y: float) -> Iterator[str]:
    """The memory of a device in the whole step as a filled line, or a thin one if only the peak is known; all devices
    have one scale, so that heights compare."""
    most = max(max(frame.timeline.high_water), 1)
    base = y + STRIP
    last = frame.left + frame.width
    peak = show_bytes(max(held for _, held in steps))
    if len(steps) == 1:
        level = base - STRIP * steps[0][1] / most
        yield tag("line", x1=frame.left, y1=level, x2=last, y2=level, class_="loan-stroke", stroke_width=1)
        yield words(f"peak {peak}", last + SHARES - 4, base - 5, "soft", 10, text_anchor="end")
        return
    (window,) = frame.windows
    points = [(frame.left, base)]
    if steps[0][0] > window.start:
        steps = ((window.start, 0), *steps)
    for (at, held), (until, _) in zip(steps, [*steps[1:], (frame.timeline.end, 0)], strict=True):
        height = base - STRIP * held / most
        points += [
            (frame.left + (time - window.start) * frame.scale, height) for time in (max(at, window.start), until)
        ]
    outline = " L ".join(f"{x:.2f} {level:.2f}" for x, level in [*points, (last, base)])
    yield tag("path", d=f"M {outline} Z", class_="soft", fill_opacity=0.22)
    yield tag("path", d=f"M {outline}", class_="line-stroke", stroke_width=1)
    yield words(peak, frame.left + frame.width + 52, base - 5, "soft", 10, text_anchor="end")


def _link(frame: Frame, link: str, y: float) -> Iterator[str]:
    yield words(link.replace("->", "→"), frame.left - 12, y + LANE - 1.2, "soft", 9.5, text_anchor="end")
    for window in frame.windows:
        yield from _track(frame, window, y, LANE, 2)
        for span in filter(window.shows, frame.timeline.on(link)):
            yield from _box(frame, window, span, y, LANE)


def axis(frame: Frame, top: float, bottom: float) -> Iterator[str]:
    """Lines from top to bottom at round times since the start of each window, with the times below."""
    for window in frame.windows:
        for at in ticks(window.seconds, most=window.seconds * frame.scale / 90):
            x = window.left + at * frame.scale
            yield tag("line", x1=x, y1=top - 4, x2=x, y2=bottom + 2, class_="line-stroke", stroke_width=1)
            yield words(frame.time(at), x, bottom + 17, "soft", 11, text_anchor="middle")


def ticks(length: float, most: float) -> Sequence[float]:
    """Round numbers from 0 to `length`, about `most` of them at most.

    >>> ticks(11, most=6)
    [0, 2, 4, 6, 8, 10]
    """
    if length <= 0:
        return [0]
    least = length / max(most, 1)
    power = 10.0 ** floor(log10(least))
    step = next(power * round_ for round_ in (1, 2, 5, 10) if power * round_ >= least * (1 - 1e-9))
    digits = max(0, -floor(log10(step)))
    return [round(i * step, digits) if digits else round(i * step) for i in range(ceil(length / step + 1e-9))]
