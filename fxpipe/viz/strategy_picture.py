"""A strategy as a picture: a box for each operator, cut as its output is, each part in the colour of its device.

    conv1      conv2      fc6            across   samples
    ┌──┬──┐    ┌──┬──┐    ┌─────┐        down     all other dimensions
    │ 0│ 1│ ─▶ │ 0│ 1│ ─▶ ├─────┤
    └──┴──┘    └──┴──┘    └─────┘

Boxes stand in columns, each to the right of all that it reads, and wrap to the next line where the page ends. Unrolled
recurrent networks are a grid instead: a row for each layer, a column for each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import fsum, prod

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, cut
from fxpipe.ir.units import count

from .svg_elements import ink_on, page, tag, text_width, words

TOP, MARGIN = 100.0, 24.0
NARROWEST = 480.0
BOX, APART = (58.0, 40.0), (84.0, 64.0)  # the size of a box, and from one to the next
NAME = 9.0  # the size of a box's name
STEP = 46.0, 40.0  # from one to the next in a grid, which has no lines between boxes
UNROLLED = 0.8  # the share of operators that are steps of a layer, for a network to be drawn as a grid
# Colours that all readers can tell apart, for up to as many devices.
COLORS = ("#1a67a8", "#f0a35e", "#0b7a5c", "#a9d3f5", "#c25a05", "#ecc3de", "#6c7887", "#a8e0cb", "#a03f7c", "#fdd3a0")

Place = tuple[int, int]  # column, row


@dataclass(frozen=True)
class _Layout:
    """Where the boxes stand: `places` by operator; in a grid `rows` has the names of the rows."""

    places: Mapping[str, Place]
    rows: tuple[str, ...] = ()

    @property
    def columns(self) -> int:
        return 1 + max((column for column, _ in self.places.values()), default=0)


@dataclass(frozen=True)
class _Sheet:
    """Where boxes are drawn, in pixels.

    - `spots`: the upper left corner of each operator's box.
    - `size`: width and height of a box.
    - `left`, `right`, `bottom`: the edges of what is drawn.
    - `named`: whether boxes have their names above them.
    """

    spots: Mapping[str, tuple[float, float]]
    size: tuple[float, float]
    left: float
    right: float
    bottom: float
    named: bool


def draw(graph: OperatorGraph, strategy: Strategy, cluster: Cluster, facts: str = "", width: int = 1200) -> str:
    """The picture as the text of an SVG file, with lines of boxes that are at most `width` pixels wide; `facts` is a
    line below the title."""
    drawn = [operator for operator in graph if operator.kind != "input"]
    configs = dict(zip((operator.name for operator in graph), strategy.configs, strict=True))
    layout = _grid(drawn) or _layers(drawn)
    sheet = _sheet(layout, width)
    colors = _colors(cluster)
    body = [
        words(graph.name, MARGIN, 36, size=17, font_weight=600),
        words(facts or _facts(len(drawn), len(cluster.devices)), MARGIN, 57, "soft", 12.5),
        *(_names(layout, sheet) if layout.rows else _edges(drawn, sheet)),
    ]
    for operator in drawn:
        body += _box(operator, configs[operator.name], sheet, colors)
    legend, bottom = _legend(cluster, colors, sheet)
    return page(sheet.right, bottom + 24, graph.name, [*body, *legend])


def _facts(operators: int, devices: int) -> str:
    return f"{count(operators, 'operator', 'operators')} on {count(devices, 'device', 'devices')}"


def _sheet(layout: _Layout, width: float) -> _Sheet:
    """Lines of boxes that are no wider than `width`; a grid has one line."""
    grid = bool(layout.rows)
    across, down = STEP if grid else APART
    left = MARGIN + max((text_width(row, 11) + 14 for row in layout.rows), default=0.0)
    line = layout.columns if grid else max(1, int((width - left - MARGIN + across - BOX[0]) // across))
    heights = [0] * ((layout.columns - 1) // line + 1)
    for column, row in layout.places.values():
        heights[column // line] = max(heights[column // line], row + 1)
    tops = [TOP + down * fsum(heights[:at]) + MARGIN * at for at in range(len(heights))]
    spots = {
        name: (left + across * (column % line), tops[column // line] + down * row)
        for name, (column, row) in layout.places.items()
    }
    right = max(NARROWEST, left + across * min(line, layout.columns) + MARGIN)
    size = (across - 4, down - 6) if grid else BOX
    return _Sheet(spots, size, left, right, tops[-1] + down * heights[-1] + 16, named=not grid)


def _layers(operators: Sequence[Operator]) -> _Layout:
    """Each operator in the column after all that it reads, in the first free row from the highest of theirs down."""
    places: dict[str, Place] = {}
    taken: dict[int, set[int]] = {}
    for operator in operators:
        read = [places[name] for name in operator.inputs if name in places]
        column = 1 + max((column for column, _ in read), default=-1)
        rows = taken.setdefault(column, set())
        row = min((row for _, row in read), default=0)
        while row in rows:
            row += 1
        rows.add(row)
        places[operator.name] = (column, row)
    return _Layout(places)


def _grid(operators: Sequence[Operator]) -> _Layout | None:
    """A row for each layer of which there are several steps; None unless most operators are such steps. Other operators
    have rows of their own, and stand at the step that they read."""
    count = Counter(operator.weight_group for operator in operators)
    if sum(count[o.weight_group] > 1 for o in operators if o.weights) < UNROLLED * len(operators):
        return None
    rows = list(dict.fromkeys(operator.weight_group or operator.name for operator in operators))
    seen: Counter[str] = Counter()
    places: dict[str, Place] = {}
    for operator in operators:
        row = operator.weight_group or operator.name
        read = max((places[name][0] for name in operator.inputs if name in places), default=0)
        places[operator.name] = (seen[row] if count[operator.weight_group] > 1 else read, rows.index(row))
        seen[row] += 1
    return _Layout(places, tuple(rows))


def _names(layout: _Layout, sheet: _Sheet) -> Iterator[str]:
    """The names of a grid's rows, and the numbers of its columns."""
    across, down = STEP
    for row, name in enumerate(layout.rows):
        yield words(name, sheet.left - 12, TOP + down * row + down / 2, "soft", 11, text_anchor="end")
    for column in range(layout.columns):
        x = sheet.left + across * column + sheet.size[0] / 2
        yield words(str(column), x, TOP - 8, "soft", 9.5, text_anchor="middle")


def _edges(operators: Sequence[Operator], sheet: _Sheet) -> Iterator[str]:
    """A curve from each operator to those that read it; to another line of boxes it leaves at the right edge and comes
    in at the left edge."""
    wide, high = sheet.size
    for operator in operators:
        x2, y2 = sheet.spots[operator.name]
        for name in dict.fromkeys(operator.inputs):
            if name not in sheet.spots:
                continue
            x1, y1 = sheet.spots[name]
            start, end = (x1 + wide, y1 + high / 2), (x2, y2 + high / 2)
            if x2 > x1:
                yield _line(*start, *end)
            else:
                yield _line(*start, sheet.right - 12, start[1])
                yield _line(12, end[1], *end)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (x1 + x2) / 2 if y1 != y2 else x1
    bend = f"C {max(middle, x2 - 16):.2f} {y1:.2f} {max(middle, x2 - 16):.2f} {y2:.2f} {x2:.2f} {y2:.2f}"
    path = f"M {x1:.2f} {y1:.2f} " + (bend if y1 != y2 else f"H {x2:.2f}")
    return tag("path", d=path, class_="line-stroke", stroke_width=1.2)


def _box(operator: Operator, config: Config, sheet: _Sheet, colors: Sequence[str]) -> Iterator[str]:
    """The box of an operator: samples across, all other dimensions down, the last one fastest; holders
    of a region share its place."""
    (x, y), (wide, high) = sheet.spots[operator.name], sheet.size
    where = " ".join(map(str, config.devices))
    hint = tag("title", escape(f"{operator.name}, {operator.kind}: {cut(operator, config)}, on {where}", quote=False))
    frame = tag("rect", x=x - 1, y=y - 1, width=wide + 2, height=high + 2, rx=4, class_="track")
    rows = prod(config.degrees[1:]) * config.holders
    across, down = wide / config.degrees[0], high / rows
    parts = [
        _part(device, x + across * (part // rows), y + down * (part % rows), (across, down), colors[device])
        for part, device in enumerate(config.devices)
    ]
    yield tag("g", "".join([hint, frame, *parts]))
    if sheet.named:
        yield words(_short(operator.name, APART[0] - 6), x, y - 5, "soft", NAME)


def _part(device: int, x: float, y: float, size: tuple[float, float], color: str) -> str:
    """A part of a box, with the number of its device where that fits."""
    wide, high = size
    gap = 0.5 if min(size) > 4 else 0.0
    part = tag("rect", x=x + gap, y=y + gap, width=wide - 2 * gap, height=high - 2 * gap, rx=2 * gap, fill=color)
    font = min(11.0, 0.86 * high)
    if high < 7 or text_width(str(device), font) >= wide:
        return part
    style = {"text_anchor": "middle", "fill": ink_on(color), "font_size": font}
    return part + tag("text", str(device), x=x + wide / 2, y=y + high / 2 + 0.36 * font, **style)


def _short(name: str, width: float) -> str:
    """The name, shortened from its start if it is wider than `width`."""
    if text_width(name, NAME) <= width:
        return name
    while text_width("…" + name, NAME) > width:
        name = name[1:]
    return "…" + name


def _colors(cluster: Cluster) -> tuple[str, ...]:
    """A colour for each device; where there are too many, one for each server, in shades."""
    if len(cluster.devices) <= len(COLORS):
        return COLORS[: len(cluster.devices)]
    servers = list(dict.fromkeys(device.server for device in cluster.devices))
    crowd = Counter(device.server for device in cluster.devices)
    seen: Counter[str] = Counter()
    found = []
    for device in cluster.devices:
        hue = 360 * 0.618 * servers.index(device.server) % 360
        found.append(_hsl(hue, 0.3 + 0.45 * (seen[device.server] + 0.5) / crowd[device.server]))
        seen[device.server] += 1
    return tuple(found)


def _hsl(hue: float, light: float) -> str:
    """A colour of half saturation, as `#rrggbb`."""
    strong = 0.55 * min(light, 1 - light)

    def channel(n: int) -> int:
        k = (n + hue / 30) % 12
        return round(255 * (light - strong * max(-1, min(k - 3, 9 - k, 1))))

    return f"#{channel(0):02x}{channel(8):02x}{channel(4):02x}"


def _legend(cluster: Cluster, colors: Sequence[str], sheet: _Sheet) -> tuple[list[str], float]:
    """The colours of the devices, and the y at which the legend ends."""
    lines, x, y = [], MARGIN, sheet.bottom
    for number, (device, color) in enumerate(zip(cluster.devices, colors, strict=True)):
        text = f"{number}  {device.label}"
        if x + text_width(text, 11) + 40 > sheet.right:
            x, y = MARGIN, y + 20
        lines.append(tag("rect", x=x, y=y - 10, width=12, height=12, rx=2, fill=color))
        lines.append(words(text, x + 18, y, "soft", 11))
        x += text_width(text, 11) + 40
    lines.append(words("across: samples; down: all other dimensions", MARGIN, y + 22, "soft", 11))
    return lines, y + 22
