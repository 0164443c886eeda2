"""`fxpipe doctor`: what it says of a machine that is well, and of one that is not."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from fxpipe.api import doctor
from fxpipe.api.cli.main import main
from fxpipe.api.doctor import BROKEN, NONE, OK, SLOW, Finding
from fxpipe.torch_internals.capability import capabilities
from fxpipe.torch_internals.tensor_memory import STORAGE_KEY, USE_COUNT

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes seconds."""
    monkeypatch.setattr(doctor, "gloo", lambda: Finding(OK, "gloo", "not tried"))
    monkeypatch.setattr(doctor, "run", lambda: iter([Finding(OK, "pipe on cpu", "not tried")]))


@pytest.mark.usefixtures("few_checks")
def test_the_command_looks_at_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for what in ("versions", "CPU", "GPUs", "C++ compiler", "threads", "shared memory", "temporary folder", "nccl"):
        assert what in text
    assert "pipe on cpu" not in text
    assert text.endswith("nothing is broken\n")
    assert main(["doctor", "--run"]) == 0
    assert "pipe on cpu" in capsys.readouterr().out


@pytest.mark.usefixtures("few_checks")
def test_the_page_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The same things in the same order, and the same number of torch's internals; the figures are of a machine."""
    assert main(["doctor"]) == 0
    printed, page = capsys.readouterr().out, PAGE.read_text()
    shown = page[page.index("ok    versions") : page.index("nothing is broken")]
    assert f"all {len(capabilities())} are as fxpipe knows them" in shown
    of_page, of_command = (
        re.findall(r"^(?:ok|slow|none|broken) +(.+?)  ", text, re.MULTILINE) for text in (shown, printed)
    )
    assert of_page == of_command


@pytest.mark.usefixtures("few_checks")
def test_something_broken_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> NoReturn:
        raise OSError("no way")

    monkeypatch.setattr(doctor, "gloo", fails)
    fails.__name__ = "gloo"
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "OSError: no way" in text
    assert text.endswith("broken: gloo\n")


def test_a_compiler_that_is_missing_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.compiler().state == NONE
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\necho nothing works >&2\nexit 3\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    found = doctor.compiler()
    assert (found.state, found.text) == (SLOW, f"{bad} fails: nothing works")


def test_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    costs = iter([3.0, 1.0])
    monkeypatch.setattr(doctor, "_two_workers", lambda: next(costs))
    found = doctor.threads()
    assert found.state == SLOW
    assert "OMP_NUM_THREADS is not set: two workers at once take 3.0 times as long" in found.text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert doctor.threads().state == OK


@pytest.mark.parametrize(("version", "state"), [("2.12.0", BROKEN), ("2.13.0+cpu", OK), ("3.1.0+cpu", NONE)])
def test_versions_of_torch(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old one is not enough, a newer one than the tested ones is to be tried."""
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.versions().state == state


def test_what_this_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.torch_internals().state == OK
    monkeypatch.setitem(vars(USE_COUNT), "there", False)
    found = doctor.torch_internals()
    assert (found.state, found.text) == (SLOW, f"without {USE_COUNT.what}: {USE_COUNT.without}")
    monkeypatch.setitem(vars(STORAGE_KEY), "there", False)
    assert doctor.torch_internals().state == BROKEN


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    assert doctor.guarded("temporary folder", doctor.temporary_folder).state == BROKEN
    monkeypatch.setenv("FXPIPE_SHARED_MEMORY", "0")
    assert doctor.shared_memory().state == SLOW


def test_a_small_model_on_cpu_workers() -> None:
    found = doctor.verified(["cpu", "cpu"])
    assert found.state == OK, found.text


@pytest.mark.slow
def test_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run"]) == 0, capsys.readouterr().out
    assert "two ranks have the plain model's loss and gradients" in capsys.readouterr().out
