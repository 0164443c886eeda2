"""The script that `fxpipe plan --launch` writes runs as it is, over the ranks of torchrun: one rank is killed after a
checkpoint, or all are, and the losses that follow are those of a run that nobody has disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fxpipe.api.cli.main import main
from fxpipe.ir.cluster.cluster import Cluster, dump

ROOT = Path(__file__).parents[4]
MODEL = """
from torch import nn


def make():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))))
"""
# In the section of the data, as a user edits it.
DATA = "    random = torch.Generator().manual_seed(step)\n"
KILL = """\
    killed = os.environ.get("TEST_KILLS", "").split()
    if step == 3 and os.environ["RANK"] in killed and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
"""


def started(folder: Path, checkpoints: str, kills: str, restarts: int) -> subprocess.CompletedProcess[str]:
    """`launch.sh`, with torchrun of the Python that runs this test."""
    torchrun = folder.parent / "bin" / "torchrun"
    torchrun.parent.mkdir(exist_ok=True)
    torchrun.write_text(f'#!/bin/bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    script = folder / "launch.sh"
    script.write_text(re.sub(r"--max-restarts \d", f"--max-restarts {restarts}", script.read_text()))
    here = {"PATH": f"{torchrun.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TEST_KILLS": kills}
    return subprocess.run(
        ["bash", str(script), "--steps", "6", "--save-every", "2", "--checkpoints", checkpoints],
        env=os.environ | here, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def values(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by their keys."""
    held = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in held.items()}  # type: ignore[union-attr]
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return {key: value for key, value in state.items() if not key.startswith("about.")}


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed, and torchrun starts all again; or all are, and the user does."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("two.json").write_text(dump(Cluster.of([f"cpu:{i}" for i in range(2)])))
    options = ("--cluster", "two.json", "--batch", "8", "--planner", "straight", "--micro-batches", "4")
    assert main(["plan", "model.py:make", "f32[8,8]", *options, "--meta", "--launch", "run"]) == 0
    folder = tmp_path / "run"
    script = folder / "train.py"
    assert DATA in script.read_text()

    whole = started(folder, "whole", "", restarts=0)
    assert whole.returncode == 0, whole.stderr
    first, *wanted = whole.stdout.splitlines()
    assert first == "steps 0 to 6 on 2 ranks"
    assert [line.split()[1] for line in wanted] == ["1", "2", "3", "4", "5", "6"]
    resumed = [first, *wanted[:3], "steps 2 to 6 on 2 ranks", *wanted[2:]]

    script.write_text(script.read_text().replace(DATA, KILL + DATA))
    one = started(folder, "one", "1", restarts=1)
    assert one.returncode == 0, one.stderr
    assert one.stdout.splitlines() == resumed

    killed = started(folder, "all", "0 1", restarts=0)
    assert killed.returncode != 0
    again = started(folder, "all", "", restarts=0)
    assert again.returncode == 0, again.stderr
    assert [*killed.stdout.splitlines(), *again.stdout.splitlines()] == resumed

    theirs = values(folder / "whole" / "6")
    for ours in map(values, (folder / "one" / "6", folder / "all" / "6")):
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
