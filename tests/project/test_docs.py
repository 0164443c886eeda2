"""The pages in docs/ are true: the files that they name are there, and so are the functions of a walk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NEW = {"passes/skip_empty_dropout.py", "tests/passes/test_skip_empty_dropout.py"}  # of a worked example


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_it_names_are_there(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text)) | set(re.findall(r"\]\(([\w./]+\.md)\)", text))
    paths = {name for name in named - NEW if "/" in name.rstrip("/") or name.endswith(".md")}
    gone = [name for name in paths if not (ROOT / name).exists() and not (page.parent / name).exists()]
    assert not gone, f"{page.name} names {gone}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_that_it_places_are_there(page: Path) -> None:
    """`name` (`file`) says that the function or class is defined in the file."""
    for name, file in re.findall(r"`([\w.]+)` \(`((?:[\w.]+/)+\w+\.py)`\)", page.read_text()):
        source = (ROOT / file).read_text() if file not in NEW else ""
        leaf = name.rpartition(".")[2]
        assert file in NEW or re.search(rf"^\s*(?:def|class) {leaf}\b|^{leaf}\b.* = ", source, re.M), (
            f"{name} in {file}"
        )
