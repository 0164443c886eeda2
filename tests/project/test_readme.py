"""The front page is true: its code runs, in order, and what it shows is what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fxpipe import backend

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SHOWN = {
    "explain": ("```\n", "demo/explain.txt"),
    "stage": ("```python\n", "demo/unet/stage2.py"),
    "schedule": ("```\n", "demo/schedule.txt"),
}


def shown(name: str) -> str:
    fence, golden = SHOWN[name]
    text = (ROOT / "tests" / "golden" / golden).read_text()
    return f"<!-- {name} -->\n{fence}{text}```\n<!-- end -->"


def test_what_it_shows_is_what_is_printed(request: pytest.FixtureRequest) -> None:
    text = README.read_text()
    if request.config.getoption("--update-golden"):
        for name in SHOWN:
            text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, n=name: shown(n), text, flags=re.DOTALL)
        README.write_text(text)
    for name in SHOWN:
        assert shown(name) in text, "accept with pytest --update-golden"


def test_its_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README.read_text())
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).is_file()


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if "fxpipe" not in torch.compiler.list_backends():  # where it is not installed
        torch._dynamo.register_backend(backend.backend, name="fxpipe")
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end -->", "", README.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, names)
    printed = capsys.readouterr().out
    for name in SHOWN:
        shown_text = shown(name).split("```")[1].split("\n", 1)[1]
        assert shown_text.strip() in printed


def test_its_commands_are_the_ones_that_ci_runs() -> None:
    assert "pip install -e '.[test]' && pytest" in README.read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -e '.[test]'" in ci
    assert re.search(r"^pytest$", ci, re.MULTILINE)
