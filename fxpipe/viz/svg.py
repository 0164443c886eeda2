"""A timeline or schedule as a picture: a row per device, a box per forward and backward, time to the right.

The colour of a box says what was done, its shade and number which micro-batch; time without a box is idle. Below a row
is the device's memory, and below all rows, thinner, are the links between devices. Pointing at a box shows more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from fxpipe.ir.schedule.schedule import Schedule, plain
from fxpipe.ir.timeline import KINDS, Span, Steps, Timeline, even
from fxpipe.ir.units import show_bytes, show_seconds

from .svg_elements import ink_on, page, shade, tag, text_width, words

ROW, GAP, STRIP, LANE = 30.0, 8.0, 22.0, 9.0  # heights: device row, between rows, memory, link


@dataclass(frozen=True)
class _Frame:
    """The time axis of the picture: from `left` on, `scale` pixels per second.

    - `chunks`: how many micro-batches there are, for shades.
    - `stages`: whether boxes show their stage.
    - `named`: whether boxes show the label of what was done, because there is only one micro-batch.
    """

    timeline: Timeline
    left: float
    width: float
    chunks: int
    stages: bool
    named: bool

    @property
    def scale(self) -> float:
        return self.width / self.timeline.makespan if self.timeline.makespan else 0.0

    def x(self, seconds: float) -> float:
        return self.left + (seconds - self.timeline.start) * self.scale

    def color(self, span: Span) -> str:
        return shade(span.kind, span.micro_batch / (self.chunks - 1) if self.chunks > 1 else 0.5)


def draw(
    value: Timeline | Schedule,
    title: str = "",
    width: int = 960,
    memory: bool = True,
    links: bool = True,
    theme: str = "auto",
) -> str:
    """The picture as the text of an SVG file, `width` pixels wide. In a schedule, every forward takes one unit of time,
    and every backward two. `memory` and `links` are drawn where they are known; `theme` is "light", "dark" or
    "auto", which follows the page that shows it."""
    timeline = even(value) if isinstance(value, Schedule) else value
    frame = _frame(timeline, width, shows_links=links, stages=not _plain(value))
    lines = [words(title or timeline.name, 24, 36, size=17, font_weight=600)]
    lines.append(words(_facts(value, timeline), 24, 57, "soft", 12.5))
    lines.append(words("busy", width - 24, 57, "soft", 11, text_anchor="end"))
    y = 70.0
    body: list[str] = []
    for device in range(len(timeline.devices)):
        steps = timeline.memory[device] if memory and timeline.memory else ()
        body += _device(frame, device, y, steps)
        y += ROW + (STRIP + 4 if steps else 0) + GAP
    if links and timeline.links:
        y += 4
        for link in timeline.links:
            body += _link(frame, link, y)
            y += LANE + 5
    lines += [*_axis(frame, 70.0, y, seconds=isinstance(value, Timeline)), *body]
    legend, bottom = _legend(frame, y + 44)
    return page(width, bottom + 24, title or timeline.name, [*lines, *legend], theme)


def _plain(value: Timeline | Schedule) -> bool:
    """Whether each device has one stage, so that boxes need not show it."""
    if isinstance(value, Schedule):
        return plain(value)
    return all(len({span.stage for span in value.on(device)}) <= 1 for device in value.devices)


def _frame(timeline: Timeline, width: int, shows_links: bool, stages: bool) -> _Frame:
    names = [text_width(name) for name in timeline.devices]
    names += [text_width(name, 9.5) for name in timeline.links if shows_links]
    left = 24 + max(names, default=0.0) + 12
    chunks = 1 + max((span.micro_batch for span in timeline.spans), default=0)
    named = chunks == 1 and any(span.label for span in timeline.spans if span.kind == "F")
    return _Frame(timeline, left, width - left - 76, chunks, stages, named)


def _facts(value: Timeline | Schedule, timeline: Timeline) -> str:
    bubble = f"bubble {timeline.bubble:.1%}"
    if isinstance(value, Schedule):
        return f"{value.num_stages} stages, {value.chunks} micro-batches, {bubble} where stages are alike"
    return f"step {show_seconds(timeline.makespan)}, {bubble}"


def _device(frame: _Frame, device: int, y: float, steps: Steps) -> Iterator[str]:
    timeline, name = frame.timeline, frame.timeline.devices[device]
    share = timeline.busy[device] / timeline.makespan if timeline.makespan else 0.0
    middle = y + ROW / 2 + 4.3
    yield words(name, frame.left - 12, middle, text_anchor="end")
    yield tag("rect", x=frame.left, y=y, width=frame.width, height=ROW, rx=4, class_="track")
    for span in timeline.on(name):
        yield from _box(frame, span, y, ROW)
    yield words(f"{share:.0%}", frame.left + frame.width + 52, middle, text_anchor="end")
    if steps:
        yield from _memory(frame, steps, y + ROW + 4)


def _box(frame: _Frame, span: Span, y: float, height: float) -> Iterator[str]:
    """A box with a small gap to the next, its micro-batch if there is room, and a text shown on pointing at it."""
    color, x = frame.color(span), frame.x(span.start) + 0.5
    wide = max(span.seconds * frame.scale - 1, 0.6)
    told = f"{KINDS[span.kind]} {span.label}" if frame.named else f"{span}: {span.label}" if span.label else str(span)
    hint = tag("title", escape(told, quote=False))
    yield tag("rect", hint, x=x, y=y, width=wide, height=height, rx=min(3.0, wide / 4), fill=color)
    text, below = str(span.micro_batch), str(span.stage) if frame.stages else ""
    if frame.named:
        text, below = span.label, ""
    fits = [size for size in (12, 10, 8) if text_width(text, size) + text_width(below, 8) + 2 <= wide]
    if height >= ROW and fits:
        small = tag("tspan", below, dy=3, font_size=8) if below else ""
        style = {"text_anchor": "middle", "fill": ink_on(color), "pointer_events": "none"}
        yield tag("text", text + small, x=x + wide / 2, y=y + height / 2 + 0.36 * fits[0], font_size=fits[0], **style)


def _memory(frame: _Frame, steps: Steps, y: float) -> Iterator[str]:
    """The memory of a device as a filled line; all devices have one scale, so that heights compare."""
    most = max(max(frame.timeline.high_water), 1)
    base = y + STRIP
    last = frame.left + frame.width
    points = [(frame.left, base)]
    for (at, held), (until, _) in zip(steps, [*steps[1:], (frame.timeline.end, 0)], strict=True):
        height = base - STRIP * held / most
        points += [(frame.x(max(at, frame.timeline.start)), height), (frame.x(until), height)]
    outline = " L ".join(f"{x:.2f} {level:.2f}" for x, level in [*points, (last, base)])
    yield tag("path", d=f"M {outline} Z", class_="soft", fill_opacity=0.22)
    yield tag("path", d=f"M {outline}", class_="line-stroke", stroke_width=1)
    peak = show_bytes(max(held for _, held in steps))
    yield words(peak, frame.left + frame.width + 52, base - 5, "soft", 10, text_anchor="end")


def _link(frame: _Frame, link: str, y: float) -> Iterator[str]:
    yield words(link.replace("->", "→"), frame.left - 12, y + LANE - 1.2, "soft", 9.5, text_anchor="end")
    yield tag("rect", x=frame.left, y=y, width=frame.width, height=LANE, rx=2, class_="track")
    for span in frame.timeline.on(link):
        yield from _box(frame, span, y, LANE)


def _axis(frame: _Frame, top: float, bottom: float, seconds: bool) -> Iterator[str]:
    """Lines from top to bottom at round times, with the times below."""
    for at in ticks(frame.timeline.makespan, most=frame.width / 90):
        x = frame.left + at * frame.scale
        yield tag("line", x1=x, y1=top - 4, x2=x, y2=bottom + 2, class_="line-stroke", stroke_width=1)
        label = show_seconds(at) if seconds else f"{at:g}"
        yield words(label, x, bottom + 17, "soft", 11, text_anchor="middle")


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


def _legend(frame: _Frame, y: float) -> tuple[list[str], float]:
    """What the colours mean, on one or two lines, and the y at which the legend ends."""
    lines, x = [], frame.left
    there = {span.kind for span in frame.timeline.spans}
    for kind in (kind for kind in KINDS if kind in there):
        for half in range(3):
            lines.append(tag("rect", x=x + half * 8, y=y - 9, width=8, height=11, fill=shade(kind, half / 2)))
        lines.append(words(KINDS[kind], x + 30, y, "soft", 11.5))
        x += 30 + text_width(KINDS[kind], 11.5) + 22
    last = frame.chunks - 1
    says = f"shade and number: micro-batch 0 to {last}" if last else "number: micro-batch"
    says += "; small number: stage" if frame.stages else ""
    if frame.named:
        return lines, y
    if x + text_width(says, 11.5) <= frame.left + frame.width:
        lines.append(words(says, frame.left + frame.width, y, "soft", 11.5, text_anchor="end"))
        return lines, y
    return [*lines, words(says, frame.left, y + 22, "soft", 11.5)], y + 22
