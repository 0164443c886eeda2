"""A step in torch's profiler reads like its schedule."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

import fxpipe
from fxpipe.engines.common import profiler_ranges
from fxpipe.ir.schedule.schedule import Action

X = torch.randn(6, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def ranges(run: Any, folder: Path) -> list[list[str]]:
    """The names of the ranges of each thread, in order."""
    threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as recorded:
        run()
    recorded.export_chrome_trace(str(folder / "ops.json"))
    found: defaultdict[int, list[str]] = defaultdict(list)
    events = json.loads((folder / "ops.json").read_text())["traceEvents"]
    for event in sorted((one for one in events if one["ph"] == "X"), key=lambda one: one["ts"]):
        if re.fullmatch(r"[FBIWR]\d+\.\d+|(recv|send) \d+\.\d+ .*", event["name"]):
            found[event["tid"]].append(event["name"])
    return list(found.values())


def actions(names: list[str]) -> list[str]:
    return [name for name in names if name[0] in "FBIWR"]


def spelled(action: Action) -> str:
    return f"{action.kind}{action.stage}.{action.micro_batch}"


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "gpipe", "checkpoint": "always"},
        {"schedule": "zb-h1", "backward": "code"},
        {"schedule": "interleaved"},
        {"schedule": "1f1b", "replicas": (1, 2)},
    ],
    ids=str,
)
def test_each_row_of_a_step_is_that_of_the_schedule(options: dict[str, Any], tmp_path: Path) -> None:
    pipe = fxpipe.compile(model(), devices=3 if "replicas" in options else 2, chunks=3, **options)

    def step() -> None:
        pipe.step(X, target=X, loss_fn=F.mse_loss)

    step()
    found = ranges(step, tmp_path)
    rows = [[spelled(action) for action in row] for row in pipe.build.schedule.devices]
    done = [[name for name in actions(names) if name[0] != "R"] for names in found]
    if len(done) == 1 and "replicas" not in options:  # one thread runs all rows of a small model
        assert sorted(done[0]) == sorted(name for row in rows for name in row)
        done = [[name for name in done[0] if name in row] for row in rows]
    assert sorted(map(tuple, done)) == sorted(map(tuple, [*rows, *rows[1:]] if "replicas" in options else rows))
    said = [name for names in found for name in names]
    assert any(name.startswith("R") for name in said) or "checkpoint" not in options
    assert any(re.fullmatch(r"send 0\.2 \w+", name) for name in said)
    assert any(re.fullmatch(r"recv 0\.2 d\w+", name) for name in said)
    pipe.close()


def test_calls(tmp_path: Path) -> None:
    pipe = fxpipe.compile(model(), devices=2, chunks=3)
    pipe(X)
    found = ranges(lambda: pipe(X), tmp_path)
    assert sorted(name for names in found for name in names) == [f"F{j}.{i}" for j in range(2) for i in range(3)]
    pipe.close()


def test_there_are_none_without_a_profiler() -> None:
    pipe = fxpipe.compile(model(), devices=2, chunks=3)
    with patch.object(profiler_ranges, "wrap") as shown:
        pipe.step(X, target=X, loss_fn=F.mse_loss)
        assert not shown.called
        with profile(activities=[ProfilerActivity.CPU]):
            pipe.step(X, target=X, loss_fn=F.mse_loss)
    assert shown.called
    pipe.close()
