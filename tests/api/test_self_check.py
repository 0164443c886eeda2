"""A torch that has not been tested is tried once, by small models in several ways."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.api import self_check
from fxpipe.errors import FxpipeError


@pytest.fixture
def new_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch of which nothing is known; returns the folder of what is remembered."""
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_asked", set())
    return tmp_path / "fxpipe"


def compiled() -> list[str]:
    """What is told when a pipe is made."""
    model, state = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.get_rng_state()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fxpipe.compile(model, 2, 2).close()
    assert torch.equal(torch.get_rng_state(), state)
    return [str(one.message) for one in told if "has not been tested" in str(one.message)]


def test_what_is_right_is_said_once_and_remembered(new_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [message] = compiled()
    assert message.startswith("PyTorch 2.99.0 has not been tested with fxpipe (2.13, 2.14 and 2.15 have)")
    assert compiled() == []
    monkeypatch.setattr(self_check, "_asked", set())  # another process
    monkeypatch.setattr(self_check, "attempt", None)
    assert compiled() == []
    assert len([*new_torch.iterdir()]) == 1


@pytest.mark.parametrize("way", self_check.WAYS)
def test_what_is_wrong_is_named(way: str, new_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(compile: Any, options: dict[str, Any]) -> str:
        return "a gradient is another" if options is self_check.WAYS[way] else ""

    monkeypatch.setattr(self_check, "attempt", attempt)
    for _ in range(2):
        with pytest.raises(FxpipeError, match=rf"with it {way} .* a gradient is another; install .* 2\.15"):
            compiled()
    assert not new_torch.exists()


def test_a_wrong_gradient_is_found(new_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = fxpipe.engines.common.step.Step.backward  # type: ignore[attr-defined]

    def doubled(self: Any, j: int, i: int, *grads: Any) -> Any:
        return step(self, j, i, *[None if grad is None else grad * 2 for grad in grads])

    monkeypatch.setattr(fxpipe.engines.common.step.Step, "backward", doubled)  # type: ignore[attr-defined]
    with pytest.raises(FxpipeError, match="a step with 1F1B of a small model is not right"):
        compiled()


def test_a_folder_that_cannot_be_written_is_no_error(
    new_torch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(self_check, "attempt", lambda *_: "")
    assert len(compiled()) == 1


def test_a_tested_torch_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.3+cpu")
    monkeypatch.setattr(self_check, "attempt", None)
    assert compiled() == []
