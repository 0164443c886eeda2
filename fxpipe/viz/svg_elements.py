"""What all our pictures are made of: elements, colours, text widths, and the page around them.

A picture is one file without scripts or fonts of its own, equal to the byte whenever it is drawn, and follows the
reader's light or dark page. Colour-blind readers can tell the colours within a row apart, on light and dark pages, and
every colour comes with a number or a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import fsum

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"

WIDE = 1250.0  # rows of cards are made no wider, so that text can be read where a page shows the whole width

# For each kind the shades of the first and of the last micro-batch.
SHADES = {
    "F": ("#a9d3f5", "#1a67a8"),
    "B": ("#fdd3a0", "#c25a05"),
    "I": ("#ecc3de", "#a03f7c"),
    "W": ("#a8e0cb", "#0b7a5c"),
    "R": ("#8aa1a8", "#415258"),
    "T": ("#d98c8c", "#8a2e2e"),
    "A": ("#cdc5ea", "#6750a4"),
}

# For each theme: page, cards, ink, lighter ink, lines, the tint behind rows, accents for arcs, loans and flows.
THEMES = {
    "light": {
        "page": "#ffffff", "card": "#f6f8fa", "ink": "#1f2328", "soft": "#59636e", "line": "#d1d9e0",
        "track": "#eff2f5", "arc": "#c25a05", "loan": "#0b7a5c", "flow": "#1a67a8",
    },
    "dark": {
        "page": "#0d1117", "card": "#161b22", "ink": "#e6edf3", "soft": "#9198a1", "line": "#3d444d",
        "track": "#1b2129", "arc": "#f0a35e", "loan": "#5cc9a7", "flow": "#79b8f0",
    },
}  # fmt: skip


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element. `stroke_width` is written `stroke-width`, and `class_` `class`; numbers with at most two decimals;
    what is None is left out. `content` is markup already."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    inside = "".join(f' {key}="{escape(number(value))}"' for key, value in pairs)
    return f"<{name}{inside}>{content}</{name}>" if content else f"<{name}{inside}/>"


def number(value: object) -> str:
    """
    >>> number(2.0), number(1 / 3), number("x")
    ('2', '0.33', 'x')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def words(text: str, x: float, y: float, class_: str = "ink", size: float = 12, **attributes: object) -> str:
    """A line of text with its baseline at y."""
    return tag("text", escape(text, quote=False), x=x, y=y, class_=class_, font_size=size, **attributes)


def text_width(text: str, size: float = 12, mono: bool = False) -> float:
    """About how wide a text is, in pixels; fonts differ, so the estimate is rather too wide."""
    if mono:
        return size * 0.62 * len(text)
    narrow, wide = set("iljtfr.,:;|!'()[] "), set("mwMW@%")
    return size * fsum(0.34 if c in narrow else 0.9 if c in wide else 0.61 for c in text)


def shade(kind: str, position: float) -> str:
    """The colour of a kind, from the first micro-batch (0) to the last (1)."""
    first, last = (_channels(color) for color in SHADES[kind])
    return "#" + "".join(f"{round(a + (b - a) * position):02x}" for a, b in zip(first, last, strict=True))


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = (c / 255 for c in _channels(color))
    return "#0c1722" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.19 else "#ffffff"


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def arrow_head(x: float, y: float, kind: str, back: tuple[float, float]) -> str:
    """An arrow head with its point at (x, y); `back` is where it comes from."""
    dx, dy = back[0] * 8, back[1] * 8
    wing_x, wing_y = back[1] * 4.5, back[0] * 4.5
    points = f"{x:.2f},{y:.2f} {x + dx + wing_x:.2f},{y + dy + wing_y:.2f} {x + dx - wing_x:.2f},{y + dy - wing_y:.2f}"
    return tag("polygon", points=points, class_=kind)


def page(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """The whole file, which follows the light or dark page that shows it."""
    style = f"{_rules(THEMES['light'])}\n@media (prefers-color-scheme: dark) {{\n{_rules(THEMES['dark'])}\n}}"
    fonts = f"text {{ font-family: {FONT}; font-variant-numeric: tabular-nums; }}\n.mono {{ font-family: {MONO}; }}"
    size = {"width": width, "height": height, "viewBox": f"0 0 {number(width)} {number(height)}"}
    lines = [
        tag("title", escape(title, quote=False)),
        f"<style>\n{fonts}\n{style}\n</style>",
        tag("rect", width="100%", height="100%", rx=10, class_="page"),
        *body,
    ]
    return tag("svg", "\n" + "\n".join(lines) + "\n", xmlns="http://www.w3.org/2000/svg", **size, role="img") + "\n"


def _rules(colors: dict[str, str]) -> str:
    fills = [f".{name} {{ fill: {color}; }}" for name, color in colors.items() if name not in ("line",)]
    strokes = [f".{name}-stroke {{ stroke: {colors[name]}; fill: none; }}" for name in ("line", "arc", "loan", "flow")]
    return "\n".join([*fills, *strokes])
