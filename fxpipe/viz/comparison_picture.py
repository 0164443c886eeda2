"""Timelines below each other: on one scale of time, so that lengths compare, unless one is many times as long as
another."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.ir.timeline import Timeline

from .folded_timeline import bars, too_narrow
from .svg_elements import page, words
from .timeline_picture import facts, legend, one_stage_each, width_of
from .timeline_rows import SHARES, left_of, rows, whole

APART = 3.0  # as many times as long as another one may be on the same scale


def draw(timelines: Sequence[tuple[str, Timeline]], title: str) -> str:
    """The picture of timelines, each with its name, as the text of an SVG file."""
    lines_of = [line for _, line in timelines]
    width, left = max(map(width_of, lines_of)), max(map(left_of, lines_of))
    longest, shortest = (f(line.makespan for line in lines_of) for f in (max, min))
    one_scale = longest <= APART * shortest
    frames = [
        whole(line, True, not one_stage_each(line), left, _width(line, width - left - SHARES, longest * one_scale))
        for line in lines_of
    ]
    narrow = any(map(too_narrow, frames))
    says = "on one scale of time" if one_scale else "each on a scale of its own"
    lines = [words(title, 24, 36, size=17, font_weight=600)]
    lines.append(words(says + ("; heights are shares of the time" if narrow else ""), 24, 57, "soft", 12.5))
    y = 57.0
    for (name, line), frame in zip(timelines, frames, strict=True):
        head = f"{name}: {facts(line)}"
        lines.append(words(head, left, y + 33, size=12.5, font_weight=600))
        drawn, y = bars(frame, y + 46) if narrow else rows(frame, y + 46)
        lines += drawn
        y += 17
    key, bottom = legend(sorted(frames, key=lambda frame: -frame.width), y + 34, boxes=not narrow)
    return page(width, bottom + 24, title, [*lines, *key])


def _width(line: Timeline, most: float, longest: float) -> float:
    """Pixels of a step: as many as there are, or its share of what the longest has."""
    return most * line.makespan / longest if longest else most
