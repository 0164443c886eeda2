"""A step with more boxes than a picture has room for: parts of it, large enough to read, and below them the whole.

fill          54 ms   middle, from 75 ms   48 ms   end, from 144 ms
device 0  0123 ······     4▓▓8▓▓5▓▓9   ······       6▓▓ 7▓▓
device 1   0▓▓1▓▓ ···     5▓▓8▓▓6▓▓9   ······     6▓▓ 7▓▓

device 0  ▁▂▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▆▃    the share of the time for each kind of action
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from fxpipe.ir.timeline import KINDS, Span, Timeline

from .svg_elements import shade, tag, text_width, words
from .timeline_rows import STRIP, Frame, Window, axis, memory_strip, rows

NARROW, READABLE = 3.0, 4.0  # pixels: boxes that are narrower are folded; those in parts are as wide at least
APART = 64.0  # pixels between parts
BAR, BIN = 16.0, 16.0  # pixels: height of a device in the overview, and width of a column of it


def typical(timeline: Timeline) -> float:
    """How long a short action takes: the devices spend a quarter of their busy time on actions no longer."""
    lengths = sorted(span.seconds for device in timeline.devices for span in timeline.on(device) if span.seconds)
    quarter = sum(lengths) / 4
    return next((length for length, sum_ in zip(lengths, accumulate(lengths), strict=True) if sum_ >= quarter), 0.0)


def too_narrow(frame: Frame) -> bool:
    """Whether boxes of the whole step are too narrow to be told apart."""
    return 0 < typical(frame.timeline) * frame.scale < NARROW


def parts(frame: Frame) -> Frame:
    """The same rows with three parts of the step: how the pipeline fills, the middle (the first backward, if it comes
    later than the first part), and the end. A part shows how the first micro-batch goes to the last device and back, if
    that leaves boxes wide enough."""
    timeline, short = frame.timeline, typical(frame.timeline)
    wide = (frame.width - 2 * APART) / 3
    fill = max(timeline.on(device)[0].start for device in timeline.devices if timeline.on(device)) - timeline.start
    length = min(max(3 * (fill + short), 12 * short), wide / READABLE * short)
    start, last = timeline.start, timeline.end - length
    turn = min((span.start for span in timeline.spans if span.kind in "BI"), default=start)
    middle = turn - length / 2 if turn > start + length else (start + last) / 2
    names = ("fill" if frame.chunks > 1 else "start", "middle", "end")
    starts = (start, min(max(middle, start + length), last - length), last)
    windows = tuple(
        Window(at, at + length, frame.left + i * (wide + APART), name)
        for i, (at, name) in enumerate(zip(starts, names, strict=True))
    )
    return replace(frame, windows=windows, scale=wide / length)


def details(frame: Frame, top: float) -> tuple[list[str], float]:
    """The parts with their names and what is left out between them, and the y of the axis."""
    inside = parts(frame)
    lines = [words(_name(frame, window), window.left, top + 10, size=11, font_weight=600) for window in inside.windows]
    for window, after in pairwise(inside.windows):
        says = f"{frame.time(after.start - window.end)} not drawn"
        lines.append(words(says, after.left - 12, top + 10, "soft", 11, text_anchor="end"))
    drawn, bottom = rows(inside, top + 22, memory=False)
    return [*lines, *drawn], bottom


def _name(frame: Frame, window: Window) -> str:
    since = window.start - frame.timeline.start
    return f"{window.name}, from {frame.time(since)}" if since else window.name


def overview(frame: Frame, top: float) -> tuple[list[str], float]:
    """The whole step, with the parts marked, and the y of the axis."""
    says = "heights are shares of the time"
    lines = [words("whole step", frame.left, top + 10, size=11, font_weight=600)]
    lines.append(words(says, frame.left + text_width("whole step", 12) + 10, top + 10, "soft", 11))
    drawn, bottom = bars(frame, top + 40)
    return [*lines, *drawn, *_marks(frame, top + 34, bottom)], bottom


def bars(frame: Frame, top: float) -> tuple[list[str], float]:
    """A bar for each device, its memory below, and the time axis; and the y of the axis."""
    timeline, y = frame.timeline, top
    body: list[str] = []
    for device, name in enumerate(timeline.devices):
        body.append(words(name, frame.left - 12, y + BAR / 2 + 4.3, text_anchor="end"))
        body.append(tag("rect", x=frame.left, y=y, width=frame.width, height=BAR, class_="track"))
        body += _shares(frame, timeline.on(name), y)
        y += BAR
        if timeline.memory and timeline.memory[device]:
            body += memory_strip(frame, timeline.memory[device], y + 2)
            y += 2 + STRIP
        y += 6
    return [*axis(frame, top, y), *body], y


def _marks(frame: Frame, top: float, bottom: float) -> Iterator[str]:
    """The outlines of the parts, with their names above, which do not overlap where the parts are close."""
    right = frame.left
    for window in parts(frame).windows:
        x, wide = frame.left + (window.start - frame.timeline.start) * frame.scale, window.seconds * frame.scale
        yield tag("rect", x=x, y=top, width=wide, height=bottom - top, class_="flow-stroke", stroke_width=1.2)
        name = text_width(window.name, 11)
        at = max(right, min(x + (wide - name) / 2, frame.left + frame.width - name))
        yield words(window.name, at, top - 5, "flow", 11, font_weight=600)
        right = at + name + 8


def _shares(frame: Frame, spans: tuple[Span, ...], y: float) -> Iterator[str]:
    """Of each moment the share of each kind of action, one on top of the other, in columns of `BIN` pixels."""
    timeline, columns = frame.timeline, max(1, round(frame.width / BIN))
    wide, length = frame.width / columns, frame.timeline.makespan / columns
    spent = {kind: [0.0] * columns for kind in KINDS if any(span.kind == kind for span in spans)}
    for span in spans:
        start, end = span.start - timeline.start, span.end - timeline.start
        for at in range(int(start / length), min(int(end / length) + 1, columns)):
            spent[span.kind][at] += max(0.0, min(end, (at + 1) * length) - max(start, at * length))
    totals = [0.0] * columns
    drawn = []
    for kind, seconds in spent.items():
        totals = [total + own for total, own in zip(totals, seconds, strict=True)]
        path, base = f"M {frame.left:.2f} {y + BAR:.2f}", y + BAR
        for at, total in enumerate(totals):
            path += f" V {base - BAR * min(total / length, 1):.2f} H {frame.left + (at + 1) * wide:.2f}"
        drawn.append(tag("path", d=f"{path} V {base:.2f} Z", fill=shade(kind, 0.5)))
    yield from reversed(drawn)  # the totals of later kinds are behind those of earlier ones
