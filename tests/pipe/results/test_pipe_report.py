"""The page about a pipe: it is whole, needs nothing, runs nothing, and has all that the pipe knows."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.demo.unet import UNet
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.ir.graph.graph import Graph, Op, Origin
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.units import show_bytes
from fxpipe.pipe.build.build_report import special_lines
from fxpipe.pipe.results.generated_lines import pieces, user_lines
from tests.helpers.models import TiedWeight

X, IMAGES = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(-1, 1, 8 * 64).view(8, 1, 8, 8)
SECTIONS = (
    "Model", "Stages", "Cuts", "Memory", "Timeline", "Where the time goes", "Generated files", "Versions and options",
)  # fmt: skip
mse = nn.functional.mse_loss


class Page(HTMLParser):
    """The texts of a page. Asserts that each element is closed, and that none loads or runs anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open
        assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image"} & {*self.seen}
        styles = "".join(re.findall(r"(?s)<style>(.*?)</style>", text))
        assert not re.search(r"url\(|@import|http", styles)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in ("src", "srcset", "xlink:href", "action", "data")
            assert not name.startswith("on")
            assert name != "href" or re.fullmatch(r"#part\d", value or "")
            assert "http:" not in (value or "") or name == "xmlns"
            assert name == "content" or "url(" not in (value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def page_of(pipe: fxpipe.Pipe, folder: Path) -> Page:
    """The page of a pipe, which is closed."""
    path = pipe.report(folder / "report.html")
    assert path == folder / "report.html"
    told = special_lines(pipe.build)
    pipe.close()
    page = Page(path.read_text(encoding="utf-8"))
    for name in SECTIONS:
        assert page.texts.count(name) == 2  # a heading, and a link to it
    for line in told:
        assert line in page.text
    return page


@pytest.mark.slow
def test_a_model_with_skips(tmp_path: Path) -> None:
    pipe = fxpipe.compile(UNet(8), devices=4, chunks=4, schedule="1f1b")
    pipe.step(IMAGES, target=IMAGES, loss_fn=mse)
    files, schedule = dict(pipe.files), str(pipe.schedule)
    peaks = [show_bytes(held) for held in pipe.build.timeline.high_water]
    text = page_of(pipe, tmp_path).text
    assert "UNet, a step in training mode: 47 ops, 52,857 parameters in 37 tensors" in text
    assert "portal, past the stages between" in text
    assert "UNet: 4 stages, 4 micro-batches, 1f1b; times estimated for a micro-batch of 2" in text
    assert re.search(r"stage 0 \(cpu:0\)stage 3 \(cpu:3\)skip1f32\[b, 8, 8, 8\]4.1 kBportal", text)
    assert re.search(r"callerstage 0 \(cpu:0\)imagef32\[b, 1, 8, 8\]512 B", text)
    assert "unet.py:41\nx = self.middle(F.max_pool2d(skip3, 2))" in text
    assert "max_pool2d_with_indices(skip3, [2, 2])" in text
    assert "1f1b, predicted" in text
    assert "1f1b, measured" not in text
    for held in peaks:
        assert text.count(held) >= 2  # in the table, and in the picture
    assert text.count("No step was timed: pipe.step(..., timeline=True)") == 2
    assert set(files) <= set(text.split())
    assert files["plan.json"] in text
    assert files["scheduler.py"].strip() in text
    assert schedule in text
    assert "schedule='1f1b'" in text
    assert f"torch {torch.__version__}" in text


def test_after_a_timed_step(tmp_path: Path) -> None:
    pipe = fxpipe.compile(UNet(8), devices=2, chunks=2)
    pipe.step(IMAGES, target=IMAGES, loss_fn=mse, timeline=True)
    advice, compared = pipe.diagnose().advice, str(pipe.compare())
    kept = [show_bytes(held) for held in pipe.timeline.high_water]
    assert [show_bytes(held) for held in pipe.compare().timelines[0][1].high_water] == kept
    page = Page(pipe.report(tmp_path / "step.html").read_text())
    for label, held in zip(pipe.timeline.devices, kept, strict=True):
        assert re.search(
            rf"{label}[\d.]+ kB[\d.]+ kB{held}", page.text
        )  # the table; the same in both pictures, and below
        assert page.text.count(held) >= 5
    assert "memory with parameters and gradients" in page.text
    text = (tmp_path / "step.html").read_text()
    assert "No step was timed" not in text
    for told in (advice, compared, "gpipe, predicted", "gpipe, measured"):
        assert escape(told) in text
    assert "of another kind of call" not in text
    pipe.eval()
    with torch.no_grad():
        pipe(IMAGES)
    assert "The last timed step was of another kind of call" in page_of(pipe, tmp_path).text


def test_a_tied_weight(tmp_path: Path) -> None:
    pipe = fxpipe.compile(TiedWeight(), devices=2, chunks=2)
    pipe.step(X, target=X, loss_fn=mse)
    row = r"stage 0 \(cpu:0\)stage 1 \(cpu:1\)encode.weightf32\[6, 8\]192 Bshared weight: once a step, and its gradient"
    assert re.search(row, page_of(pipe, tmp_path).text)


class Odd(nn.Module):
    """Cannot be traced, so it is kept whole."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return x


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_submodule_kept_whole(tmp_path: Path) -> None:
    pipe = fxpipe.compile(nn.Sequential(nn.Linear(8, 8), Odd(), nn.Linear(8, 8)), devices=2, chunks=2)
    pipe.step(X, target=X, loss_fn=mse, timeline=True)
    text = page_of(pipe, tmp_path).text
    assert "kept whole in stage" in text
    assert re.search(
        r"opaque: test_pipe_report.py:\d+\nif x.sum\(\) > 0:\n+ *\w+, \w+_vjp = self\[1\]\.vjp\(\([\d, ]+\)\)\(", text
    )


def test_replicas(tmp_path: Path) -> None:
    pipe = fxpipe.compile(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), devices=3, chunks=2, replicas=[2, 1], cut=[1, 2]
    )
    pipe.step(X, target=X, loss_fn=mse, timeline=True)
    text = page_of(pipe, tmp_path).text
    assert "replicas: of stage 0 on cpu:0, cpu:1" in text
    assert re.findall(r"(cpu:\d)(\d+ B)\2", text) == [("cpu:0", "288 B"), ("cpu:1", "288 B"), ("cpu:2", "576 B")]


class Two(nn.Module):
    """A comment in a line."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))  # one
        return torch.tanh(self.b(h))


def test_backward_as_code_is_beside_its_lines(tmp_path: Path) -> None:
    pipe = fxpipe.compile(Two(), devices=2, chunks=2, backward="code", checkpoint="always")
    pipe.step(X, target=X, loss_fn=mse)
    text = page_of(pipe, tmp_path).text
    assert re.search(r"gradient of test_pipe_report.py:\d+\nh = torch.tanh\(self.a\(x\)\)  # one\n", text)


def test_a_strategy(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found = fxpipe.search(model, fxpipe.Cluster.of(["cpu:0", "cpu:1"]), example_inputs=X, budget=0.01)
    pipe = fxpipe.compile(model, 2, 2, plan=found)
    pipe.step(X, target=X, loss_fn=mse, timeline=True)
    assert "how operators are cut" in page_of(pipe, tmp_path).text


TEXTS = (
    "</pre></style></title></textarea><script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "--><svg onload=alert(1)>&lt;b&gt;",
    "<!--\ud800\x00",
)


@pytest.mark.parametrize("text", TEXTS)
def test_names_are_text(text: str, tmp_path: Path) -> None:
    """Of the class, its modules and parameters, the key of its outputs, and its line."""
    scope: dict[str, Any] = {}
    lines = (
        f"def forward(self, x):\n    for one in self.children(): x = one(x)  # {text.encode('ascii', 'replace')!r}\n"
    )
    exec(compile(lines + f"    return {{{text!r}: x * getattr(self, {text + '1'!r})}}\n", "<model>", "exec"), scope)
    model = type(text.replace("\0", "").encode(errors="replace").decode(), (nn.Module,), scope)()
    model.add_module(text, nn.Linear(8, 8))
    model.add_module(f"{text}2", nn.Linear(8, 8))
    model.register_parameter(f"{text}1", nn.Parameter(torch.ones(8)))
    pipe = fxpipe.compile(model, 2, 2)
    pipe.step(X, target=X, loss_fn=lambda out, target: mse(out[text], target), timeline=True)
    page = page_of(pipe, tmp_path)
    assert type(model).__name__ in page.texts
    assert "<script" not in re.sub(r"(?s)<svg.*?</svg>", "", (tmp_path / "report.html").read_text())


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = fxpipe.compile(nn.Linear(8, 8), devices=1, chunks=2)
    with pytest.raises(FxpipeError, match="nothing is compiled yet"):
        pipe.report("report.html")
    pipe(X)
    with pytest.raises(PlanError, match=r"'report.pdf' is no page: write a name that ends with .html"):
        pipe.report("report.pdf")
    assert not list(tmp_path.iterdir())
    pipe.close()
    with pytest.raises(FxpipeError, match="closed"):
        pipe.report("report.html")


# Lines beside code ----------------------------------------------------------------------------------------------------


def op(name: str, line: int, code: str, file: str = "/home/net.py") -> Op:
    return Op(name, torch.relu, (), {}, TensorType("f32", (), "cpu"), Origin(file, line, code, ""))


def graph(*ops: Op) -> Graph:
    return Graph("Net", False, (), (), (), ops, (), ((), {}), None)


FILE = '''"""A stage."""

    def forward(self, x):
        # net.py:3  layers.0  y = x.relu() + x.sin ...
        y = x.relu()
        # kept: this is no line of the user's
        with draw(1):
            # net.py:4
            z = y.sin()
        # gradient of net.py:5  w = z
        w = z

    def other(self):
        pass
'''
LONG = "y = x.relu() + x.sin() + x.cos()  # all of it"


def test_comments_with_a_line_go_to_the_left() -> None:
    known = user_lines(graph(op("y", 3, LONG), op("z", 4, "z = y.sin()"), op("w", 5, "w = z")))
    found = pieces(FILE, known)
    assert found == [
        ("", '"""A stage."""\n\n    def forward(self, x):'),
        (f"net.py:3  layers.0\n{LONG}", "        y = x.relu()\n        # kept: this is no line of the user's\n"
         "        with draw(1):"),
        ("net.py:4\nz = y.sin()", "            z = y.sin()"),
        ("gradient of net.py:5\nw = z", "        w = z"),
        ("", "    def other(self):\n        pass"),
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "known"), [("x = 2", False), ("z = y.sin()", True)])
def test_files_of_one_name(code: str, known: bool) -> None:
    """A comment without code that may be of either stays where it is."""
    lines = user_lines(graph(op("z", 4, "z = y.sin()"), op("b", 4, code, "/home/b/net.py")))
    (found,) = [text for _, text in pieces(FILE, lines) if "z = y.sin()" in text]
    assert ("# net.py:4" in found) == (not known)
