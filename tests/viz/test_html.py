"""The page of a timeline: whole, by itself, and with every figure."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from fxpipe.ir.schedule.schedule import parse
from fxpipe.ir.timeline import Span, Timeline
from fxpipe.viz.html import draw

SPANS = (Span("a<1>", 0, 1, "F", 0, 0), Span("b", 1, 2, "F", 1, 0), Span("b", 2, 4, "B", 1, 0, "x & y"))
LINE = Timeline("early", ("a<1>", "b"), SPANS, memory=(((0, 2000),), ((1, 5), (2, 0))))


class Tags(HTMLParser):
    """The open elements, and every tag seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)


def test_the_page_is_whole_and_needs_nothing() -> None:
    text = draw(LINE, "a <title>", notes="1 < 2")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert {"html", "svg", "table", "pre"} <= set(tags.seen)
    assert not {"script", "link", "img"} & set(tags.seen)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", text)
    assert "<title>a &lt;title&gt;</title>" in text
    assert "<pre>1 &lt; 2</pre>" in text


def test_the_figures_of_each_device() -> None:
    text = draw(LINE)
    assert "step 4 s, bubble 50.0%" in text
    assert "<tr><td>a&lt;1&gt;</td><td>1 s</td><td>25%</td><td>3 s</td><td>2 kB</td></tr>" in text
    assert "<tr><td>b</td><td>3 s</td><td>75%</td><td>1 s</td><td>5 B</td></tr>" in text


def test_boxes_tell_what_they_are() -> None:
    assert "<title>backward of stage 1, micro-batch 0, 2 s to 4 s: x &amp; y</title>" in draw(LINE)


@pytest.mark.parametrize("grid", ["F0 F1 B0 B1 \n F0 B0 F1 B1"])
def test_schedules(grid: str) -> None:
    text = draw(parse(grid, name="early"))
    assert "per step" not in text
    assert "<td>device 1</td><td>6</td><td>67%</td><td>3</td><td>-</td>" in text
