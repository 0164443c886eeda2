"""A timeline or schedule in the terminal: a bar per device, as long as the step.

early: 6 s, bubble 33.3%
device 0 │0░1░    0▓▓▓1▓▓▓│ 67%
device 1 │  0░0▓▓▓1░1▓▓▓  │ 67%
          0 s           9 s
░ forward  ▓ backward      the number is the micro-batch
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import KINDS, Timeline, even
from fxpipe.ir.units import show_seconds


@dataclass(frozen=True)
class Style:
    """How a bar is drawn.

    - `fill`: for each kind of span ("F", "B", its halves "I" and "W", "R": recomputation) its character.
    - `edges`: the characters at both ends of a bar.
    - `colors`: for each kind its background, one of a terminal's 256 colours; None without colours.
    """

    fill: dict[str, str]
    edges: tuple[str, str]
    colors: dict[str, int] | None = None


UNICODE = Style({"F": "░", "B": "▓", "I": "▒", "W": "█", "R": "╱"}, ("│", "│"))
ASCII = Style({"F": "-", "B": "=", "I": ":", "W": "+", "R": "~"}, ("|", "|"))
COLOR = Style(dict.fromkeys("FBIWR", " "), ("│", "│"), {"F": 75, "B": 215, "I": 176, "W": 79, "R": 248})


def bars(value: Timeline | Schedule, width: int = 80, style: Style = UNICODE) -> str:
    """The bars, `width` characters for the step. In a schedule, every forward takes one unit of time, and every
    backward two.

    >>> from fxpipe.ir.schedule.schedule import parse
    >>> print(bars(parse("F0 F1 B0 B1 \\n F0 B0 F1 B1", name="early"), width=20, style=ASCII))
    early, bubble 33.3%
    device 0 |0-1-    0===  1===| 67%
    device 1 |  0-0===1-1===    | 67%
    - forward  = backward    the number is the micro-batch
    """
    timeline = even(value) if isinstance(value, Schedule) else value
    if isinstance(value, Schedule):
        width = max(1, width // max(1, round(timeline.makespan))) * round(timeline.makespan)
        lines = [f"{timeline.name}, bubble {timeline.bubble:.1%}"]
    else:
        lines = [f"{timeline.name}: {show_seconds(timeline.makespan)}, bubble {timeline.bubble:.1%}"]
    left = max((len(name) for name in timeline.devices), default=0)
    for device, busy in zip(timeline.devices, timeline.busy, strict=True):
        share = busy / timeline.makespan if timeline.makespan else 0.0
        lines.append(
            f"{device:<{left}} {style.edges[0]}{_bar(timeline, device, width, style)}{style.edges[1]} {share:.0%}"
        )
    if not isinstance(value, Schedule):
        last = show_seconds(timeline.makespan)
        lines.append(" " * (left + 2) + "0 s" + last.rjust(max(0, width - 3)))
    return "\n".join([*lines, _legend(timeline, style)])


def _bar(timeline: Timeline, device: str, width: int, style: Style) -> str:
    """A device's row. A span has at least one character; its micro-batch stands at its left if it fits."""
    scale = width / timeline.makespan if timeline.makespan else 0.0
    bar, end = "", 0
    for span in timeline.on(device):
        first = max(end, min(round((span.start - timeline.start) * scale), width - 1))
        last = min(max(round((span.end - timeline.start) * scale), first + 1), width)
        number = str(span.micro_batch)
        text = (number if len(number) <= last - first else "").ljust(last - first, style.fill[span.kind])
        bar += " " * (first - end) + _paint(text, span.kind, style, bold=span.micro_batch % 2 == 1)
        end = last
    return bar + " " * (width - end)


def _paint(text: str, kind: str, style: Style, bold: bool = False) -> str:
    """The text on its kind's colour; every other micro-batch is bold, to tell neighbours apart."""
    if style.colors is None or not text:
        return text
    return f"\x1b[{'1;' if bold else ''}30;48;5;{style.colors[kind]}m{text}\x1b[0m"


def _legend(timeline: Timeline, style: Style) -> str:
    there = {span.kind for span in timeline.spans if span.where in timeline.devices}
    keys = [f"{_paint(style.fill[kind], kind, style)} {KINDS[kind]}" for kind in KINDS if kind in there]
    return "  ".join(keys) + "    the number is the micro-batch"
