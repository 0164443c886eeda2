"""The pages of the site, and the front page, are true: all of their code runs, prints what they show, and draws their
pictures."""

from __future__ import annotations

import re
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


def with_code(name: str) -> bool:
    return any(block.language in ("python", "sh") for block in blocks(PAGES[name].read_text()))


@pytest.mark.parametrize("name", PAGES)
def test_each_block_is_run_or_says_why_not(name: str) -> None:
    for block in blocks(PAGES[name].read_text()):
        check(block)


@pytest.mark.parametrize("name", mostly_slow(filter(with_code, PAGES), QUICK.__contains__))
def test_code_runs_and_prints_what_is_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    update = request.config.getoption("--update-golden")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if "fxpipe" not in torch.compiler.list_backends():  # where it is not installed
        torch._dynamo.register_backend(backend.backend, name="fxpipe")
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
    for drawn in tmp_path.glob("*.svg"):
        kept = PICTURES / drawn.name
        if update:
            kept.write_text(drawn.read_text())
        assert kept.is_file(), f"{name} draws {drawn.name}, which docs/pictures does not have"
        assert drawn.read_text() == kept.read_text(), f"{drawn.name} has changed: accept with pytest --update-golden"


@pytest.mark.parametrize("name", PAGES)
def test_its_pictures_are_there(name: str) -> None:
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGES[name].read_text()):
        assert (PAGES[name].parent / picture).is_file(), picture


@pytest.mark.parametrize("picture", [path.name for path in sorted(PICTURES.glob("*"))])
def test_each_picture_is_drawn_by_code_that_is_shown(picture: str) -> None:
    runs = [b.text for path in PAGES.values() for b in blocks(path.read_text()) if b.language in ("python", "sh")]
    assert any(picture in text for text in runs), f"no page draws {picture}"


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_its_commands_are_the_ones_that_ci_runs() -> None:
    assert "pip install -e '.[test]' && pytest" in (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -e '.[test]'" in ci
    assert re.search(r"^pytest$", ci, re.MULTILINE)
