"""The pages of the site, and the front page, are true: all of their code runs, prints what they show, and draws their
pictures."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import pytest
import torch

from fxpipe import backend
from tests.docs.page_blocks import Block, blocks, check, run, same
from tests.helpers.marks import mostly_slow

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
QUICK = {"README.md", "docs/start.md", "docs/index.md"}
NEEDS = {"docs/tutorials/hugging_face.md": "transformers"}  # of the extra `hf`, which tests do without


def with_code(name: str) -> bool:
    return any(block.language in ("python", "sh") for block in blocks(PAGES[name].read_text()))


@pytest.mark.parametrize("name", PAGES)
def test_each_block_is_run_or_says_why_not(name: str) -> None:
    text = PAGES[name].read_text()
    for block in blocks(text):
        check(block, text)


@pytest.mark.parametrize("name", mostly_slow(filter(with_code, PAGES), QUICK.__contains__))
def test_code_runs_and_prints_what_is_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    update = request.config.getoption("--update-golden")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if "fxpipe" not in torch.compiler.list_backends():  # where it is not installed
        torch._dynamo.register_backend(backend.backend, name="fxpipe")
    torch._dynamo.reset()  # what earlier tests have compiled is not in the reports of a page
    backend.living.clear()
    monkeypatch.setattr(backend, "numbers", count())
    torch.manual_seed(0)
    text = PAGES[name].read_text()
    page = blocks(text)
    wrong: list[tuple[Block, str]] = []
    for block, printed in run(PAGES[name].name, text, page):
        if not same(block, printed):
            assert update, f"line {block.line} of {name}: accept with pytest --update-golden. It prints:\n{printed}"
            wrong.append((block, printed))
        elif update and block.language == "measured" and "..." not in block.text:
            wrong.append((block, printed))
    for block, printed in reversed(wrong):
        text = text[: block.start] + printed.rstrip() + "\n" + text[block.end :]
    if update:
        PAGES[name].write_text(text)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    if update:
        for picture, svg in drawn.items():
            (PICTURES / picture).write_text(svg)
    for picture, svg in drawn.items():
        kept = PICTURES / picture
        assert kept.is_file(), f"{name} draws {picture}, which docs/pictures does not have"
        assert svg == kept.read_text(), f"{picture} has changed: accept with pytest --update-golden"
    if name != "README.md":  # which shows a picture of another page
        assert drawn.keys() == shown_by(text), "a page shows what its code draws, and draws what it shows"


@pytest.mark.parametrize("name", PAGES)
def test_the_lines_of_itself_that_a_page_shows_are_where_it_says(name: str) -> None:
    """Quick, where running the page is one of the longer checks: text that is added above moves the lines."""
    lines = PAGES[name].read_text().splitlines()
    for shown in re.finditer(rf"\b{re.escape(PAGES[name].name)}:(\d+)(.*\n.*)", PAGES[name].read_text()):
        code = lines[int(shown[1]) - 1].strip()
        if shown[2].startswith(")"):  # where a class or method begins
            assert code.startswith(("class ", "def ")), shown[0]
        else:  # the code is shown behind it, or below
            part, _, cut = (
                shown[2].partition("\n")[0].rpartition("  ")[2].rpartition(" ...")
            )  # a long line is not shown whole
            assert code, shown[0]
            assert code in shown[2] or (not cut and part and code.startswith(part)), shown[0]


def shown_by(text: str) -> set[str]:
    """The pictures of a page, by the names of their files."""
    return {Path(link).name for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}


@pytest.mark.parametrize("name", PAGES)
def test_its_pictures_are_there(name: str) -> None:
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGES[name].read_text()):
        assert (PAGES[name].parent / picture).is_file(), picture


def test_each_picture_is_shown() -> None:
    shown = {picture for path in PAGES.values() for picture in shown_by(path.read_text())}
    assert shown == {path.name for path in PICTURES.glob("*")}


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_its_commands_are_the_ones_that_ci_runs() -> None:
    assert "pip install -e '.[test]' && pytest" in (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -e '.[test]'" in ci
    assert len(re.findall(r"^ *pytest$", ci, re.MULTILINE)) == 2  # with the oldest PyTorch and with the newest
