"""What every drawable value does: files of each format, errors, and what a notebook shows."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.ir.drawable import Drawable, picture
from fxpipe.ir.timeline import Span, Timeline
from fxpipe.pipe.results import planned
from fxpipe.schedules.one_f_one_b import one_f_one_b

Drawn = Drawable | fxpipe.Pipe
X = torch.linspace(-1, 1, 32).view(8, 4)
SPANS = (Span("a<1>", 0, 1, "F", 0, 0), Span("b", 1, 2, "F", 1, 0), Span("b", 2, 4, "B", 1, 0, "x & y"))
LINE = Timeline("a <title>", ("a<1>", "b"), SPANS, memory=(((0, 2000),), ((1, 5), (2, 0))))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.fixture(scope="module")
def drawn() -> Iterator[dict[str, Drawn]]:
    """All that users get with a picture."""
    pipe = fxpipe.compile(net(), devices=2, chunks=4, schedule="1f1b")
    pipe.step(X, target=X, loss_fn=nn.functional.mse_loss, timeline=True)
    cluster = fxpipe.Cluster.of(["cpu:0", "cpu:1"])
    plan = fxpipe.plan(net(), cluster, 8, example_inputs=X, planner="straight")
    search = fxpipe.search(net(), cluster, example_inputs=X, budget=0.01)
    yield {
        "pipe": pipe,
        "plan": pipe.plan,
        "schedule": pipe.schedule,
        "predicted": pipe.build.timeline,
        "measured": pipe.timeline,
        "program": pipe.trail["cut"],
        "compared": pipe.compare(),
        "planned": plan,
        "compared plans": planned.compare(["a", "b"], [plan, plan]),
        "searched": search,
        "step of a strategy": search.timeline,
    }
    pipe.close()


VALUES = (
    "pipe", "plan", "schedule", "predicted", "measured", "program", "compared", "planned", "compared plans",
    "searched", "step of a strategy",
)  # fmt: skip


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


def shown(value: Any) -> dict[str, str]:
    """What a notebook gets of a value: as IPython does, by methods that return something."""
    methods = {"svg": getattr(value, "_repr_svg_", None), "html": getattr(value, "_repr_html_", None)}
    found = {kind: method() for kind, method in methods.items() if method is not None}
    return {kind: text for kind, text in found.items() if text is not None}


def test_these_are_all(drawn: dict[str, Drawn]) -> None:
    assert tuple(drawn) == VALUES


@pytest.mark.parametrize("name", VALUES)
def test_a_file_and_a_notebook_have_the_same_svg(name: str, drawn: dict[str, Drawn], tmp_path: Path) -> None:
    path = drawn[name].draw(tmp_path / "picture.svg")
    assert path == tmp_path / "picture.svg"
    text = path.read_text(encoding="utf-8")
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert shown(drawn[name]) == {"svg": text}


@pytest.mark.parametrize("name", VALUES)
def test_a_page_is_whole_and_needs_nothing(name: str, drawn: dict[str, Drawn], tmp_path: Path) -> None:
    text = drawn[name].draw(str(tmp_path / "picture.HTML")).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert {"html", "svg", "pre"} <= set(tags.seen)
    assert not {"script", "link", "img"} & set(tags.seen)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", text)
    assert drawn[name]._repr_svg_() in text


@pytest.mark.parametrize("name", VALUES)
def test_a_png(name: str, drawn: dict[str, Drawn], tmp_path: Path) -> None:
    pytest.importorskip("cairosvg", exc_type=(ImportError, OSError))
    data = drawn[name].draw(tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    size = ET.fromstring(drawn[name]._repr_svg_() or "").attrib
    assert int.from_bytes(data[16:20], "big") == pytest.approx(2 * float(size["width"]), abs=1)


def test_a_page_has_what_print_shows(tmp_path: Path) -> None:
    text = LINE.draw(tmp_path / "step.html").read_text()
    assert '<meta name="viewport" content="width=device-width' in text  # legible on a phone
    assert "<title>a &lt;title&gt;</title>" in text
    assert "\na&lt;1&gt;      1 s     3 s     2 kB\n" in text
    assert "<title>backward of stage 1, micro-batch 0, 2 s to 4 s: x &amp; y</title>" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("step.sgv", r"'step.sgv' ends with '.sgv': a picture is one of .svg, .html, .png; did you mean '.svg'\?"),
        ("step.jpg", r"did you mean '.png'\?"),
        ("step.htm", r"did you mean '.html'\?"),
        ("step", "'step' has no suffix: a picture is one of .svg, .html, .png$"),
        ("step.tiff2000", "'.tiff2000': a picture is one of .svg, .html, .png$"),
    ],
)
def test_other_formats(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=says):
        LINE.draw(name)
    assert not list(tmp_path.iterdir())


def test_without_a_renderer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(FxpipeError, match=r"needs cairosvg: pip install 'fxpipe\[png\]';"):
        LINE.draw(tmp_path / "step.png")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LINE.draw(tmp_path / "nowhere" / "step.svg")


def refused(pipe: fxpipe.Pipe, says: str) -> None:
    """Drawing is an error; a notebook shows the options."""
    with pytest.raises(FxpipeError, match=says):
        pipe.draw("stages.svg")
    (text,) = shown(pipe).values()
    assert text.startswith("<pre>Pipe of Sequential: devices=('cpu:0', 'cpu:1'), chunks=4, schedule='1f1b'\n")
    assert re.search(says, text)


def test_a_pipe_without_stages_shows_its_options() -> None:
    pipe = fxpipe.compile(net(), devices=2, chunks=4, schedule="1f1b")
    refused(pipe, "nothing is compiled yet: call the pipe once")
    pipe(X)
    assert list(shown(pipe)) == ["svg"]
    pipe.close()
    refused(pipe, "this pipe is closed")


def test_what_has_no_picture() -> None:
    with pytest.raises(TypeError, match="int has no picture"):
        picture(1)


def test_an_empty_schedule() -> None:
    assert "<svg" in shown(fxpipe.Schedule("nothing", ()))["svg"]
    assert "<svg" in shown(one_f_one_b(1, 1))["svg"]


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_same_bytes_every_time(suffix: str, tmp_path: Path, drawn: dict[str, Drawn]) -> None:
    files: list[Callable[[], Path]] = [lambda at=at: drawn["pipe"].draw(tmp_path / f"{at}{suffix}") for at in "ab"]
    first, second = (write().read_bytes() for write in files)
    assert first == second
