"""A timeline or schedule as a picture: a row per device, a box per forward and backward, time to the right.

The colour of a box says what was done, its shade and number which micro-batch; time without a box is idle. Below a row
is the device's memory, and below all rows, thinner, are the links between devices. Pointing at a box shows more. A step
of so many micro-batches that boxes would be too narrow to see is drawn in parts: see `folded_timeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.ir.schedule.schedule import Schedule, plain
from fxpipe.ir.timeline import KINDS, PEAK, Timeline, even
from fxpipe.ir.units import count, show_seconds

from .folded_timeline import details, overview, too_narrow
from .svg_elements import page, shade, tag, text_width, words
from .timeline_rows import SHARES, Frame, left_of, rows, whole

WIDTH, NARROWEST = 960.0, 640.0  # of the picture, and of its time axis


def draw(value: Timeline | Schedule, title: str = "") -> str:
    """The picture as the text of an SVG file. In a schedule, every forward takes one unit of time, and every backward
    two. Memory and links are drawn where they are known."""
    timeline = even(value) if isinstance(value, Schedule) else value
    width, left = width_of(timeline), left_of(timeline)
    frame = whole(timeline, isinstance(value, Timeline), not one_stage_each(value), left, width - left - SHARES)
    lines = [words(title or timeline.name, 24, 36, size=17, font_weight=600)]
    lines.append(words(_facts(value, timeline), 24, 57, "soft", 12.5))
    lines.append(words("busy", width - 24, 57, "soft", 11, text_anchor="end"))
    if too_narrow(frame):
        drawn, y = details(frame, 70.0)
        lines += drawn
        drawn, y = overview(frame, y + 44)
    else:
        drawn, y = rows(frame, 70.0)
    key, bottom = legend([frame], y + 44)
    return page(width, bottom + 24, title or timeline.name, [*lines, *drawn, *key])


def width_of(timeline: Timeline) -> float:
    """The width of a picture, in pixels."""
    return max(WIDTH, left_of(timeline) + SHARES + NARROWEST)


def one_stage_each(value: Timeline | Schedule) -> bool:
    """Whether each device has one stage, so that boxes need not show it."""
    if isinstance(value, Schedule):
        return plain(value)
    return all(len({span.stage for span in value.on(device)}) <= 1 for device in value.devices)


def _facts(value: Timeline | Schedule, timeline: Timeline) -> str:
    if isinstance(value, Schedule):
        bubble = f"bubble {timeline.bubble:.1%}"
        stages, chunks = count(value.num_stages, "stage", "stages"), count(value.chunks, "micro-batch", "micro-batches")
        return f"{stages}, {chunks}, {bubble} where stages are alike"
    return facts(timeline)


def facts(timeline: Timeline) -> str:
    """The time of the step, and what is drawn below the rows."""
    strips = f"; below each row: {timeline.counts}" if any(timeline.memory) and timeline.counts != PEAK else ""
    return f"step {show_seconds(timeline.makespan)}, bubble {timeline.bubble:.1%}{strips}"


def legend(frames: Sequence[Frame], y: float, boxes: bool = True) -> tuple[list[str], float]:
    """What the colours mean, on one or two lines below the first frame, and the y at which the legend ends. `boxes`:
    whether there are boxes of single micro-batches, and links."""
    frame = frames[0]
    lines, x = [], frame.left
    there = {s.kind for one in frames for s in one.timeline.spans if boxes or s.where in one.timeline.devices}
    for kind in (kind for kind in KINDS if kind in there):
        for half in range(3):
            lines.append(tag("rect", x=x + half * 8, y=y - 9, width=8, height=11, fill=shade(kind, half / 2)))
        lines.append(words(KINDS[kind], x + 30, y, "soft", 11.5))
        x += 30 + text_width(KINDS[kind], 11.5) + 22
    last = max(one.chunks for one in frames) - 1
    says = f"shade and number: micro-batch 0 to {last}" if last else "number: micro-batch"
    says += "; small number: stage" if any(one.stages for one in frames) else ""
    if not boxes or all(one.named for one in frames):
        return lines, y
    if x + text_width(says, 11.5) <= frame.left + frame.width:
        lines.append(words(says, frame.left + frame.width, y, "soft", 11.5, text_anchor="end"))
        return lines, y
    return [*lines, words(says, frame.left, y + 22, "soft", 11.5)], y + 22
