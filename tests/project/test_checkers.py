"""ruff and mypy, as part of the tests, so that one command says whether the project is well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxpipe.torch_internals.capability import LOWEST

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
    ],
    ids=" ".join,
)
def test_checker(command: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(
    not torch.__version__.startswith("{}.{}.".format(*LOWEST)),
    reason="torch's own types differ between its versions: ours are checked beside those of the oldest tested one",
)
def test_types() -> None:
    """One run, for two at once would write into one cache. Type checkers skip what they do not see as part of the
    package, in silence: it has to look into the linked folders, too."""
    run = subprocess.run([sys.executable, "-m", "mypy", "--verbose"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    for room in ("passes", "codegen"):
        assert f"fxpipe.{room}" in run.stderr, f"mypy does not look into {room}/"
