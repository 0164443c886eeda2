"""What shells complete: commands, options and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fxpipe.api.cli.completion_command import SHELLS
from fxpipe.api.cli.main import main


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_it_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(shell, capsys)
    assert all(word in text for word in ("doctor", "simulate", "stages-per-device", "time-limit"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("fxpipe comple", "completion"),
        ("fxpipe show --cu", "--cut"),
        ("fxpipe show mod", "model.py"),
        ("fxpipe show model.py:make --plan pl", "plan.json"),
        ("fxpipe simulate pl", "plan.json"),
    ],
)
def test_bash(line: str, completed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.py", "plan.json", "fxpipe.bash"):
        (tmp_path / name).write_text(printed("bash", capsys) if name == "fxpipe.bash" else "")
    words = line.split()
    script = (
        f"source fxpipe.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_fxpipe; echo ${{COMPREPLY[@]}}"
    )
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == [completed]


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "'fish' (choose from 'bash', 'zsh', 'tcsh')" in capsys.readouterr().err
