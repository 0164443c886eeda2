"""A timeline as an HTML page: the picture, whose boxes say what they are when pointed at, and the figures of each
device below. One file, without scripts, that loads nothing."""

from __future__ import annotations

from html import escape

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline, even
from fxpipe.ir.units import show_bytes, show_seconds

from . import svg
from .svg_elements import FONT, MONO, THEMES

HEADERS = ("device", "busy", "", "idle", "peak memory")


def draw(value: Timeline | Schedule, title: str = "", notes: str = "", width: int = 1200) -> str:
    """The text of an HTML file, with a picture `width` pixels wide. In a schedule, every forward takes one unit of
    time, and every backward two; `notes` is plain text shown below."""
    timeline = even(value) if isinstance(value, Schedule) else value
    name = title or timeline.name
    body = [
        f'<div class="picture">\n{svg.draw(value, name, width)}</div>',
        _table(timeline, seconds=not isinstance(value, Schedule)),
    ]
    if notes:
        body.append(f"<pre>{escape(notes)}</pre>")
    style = f"<style>\n{_style()}\n</style>"
    head = f'<meta charset="utf-8">\n<title>{escape(name)}</title>\n{style}'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _table(timeline: Timeline, seconds: bool) -> str:
    rows = [_cells("th", *HEADERS)]
    peaks = timeline.high_water or (None,) * len(timeline.devices)
    for device, busy, idle, peak in zip(timeline.devices, timeline.busy, timeline.idle, peaks, strict=True):
        share = busy / timeline.makespan if timeline.makespan else 0.0
        took = [show_seconds(t) if seconds else f"{t:g}" for t in (busy, idle)]
        held = "-" if peak is None else show_bytes(peak)
        rows.append(_cells("td", device, took[0], f"{share:.0%}", took[1], held))
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _cells(kind: str, *texts: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts) + "</tr>"


def _style() -> str:
    light, dark = THEMES["light"], THEMES["dark"]
    return f"""\
body {{ font-family: {FONT}; margin: 2rem auto; max-width: 1250px; padding: 0 1rem; {_colors(light)} }}
.picture {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums; }}
td, th {{ padding: 0.25rem 0.9rem; text-align: right; border-bottom: 1px solid #8884; font-weight: inherit; }}
td:first-child, th:first-child {{ text-align: left; }}
pre {{ font-family: {MONO}; font-size: 0.8rem; overflow-x: auto; }}
@media (prefers-color-scheme: dark) {{ body {{ {_colors(dark)} }} }}"""


def _colors(theme: dict[str, str]) -> str:
    return f"background: {theme['page']}; color: {theme['ink']};"
