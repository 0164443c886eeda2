"""At the door to several processes: what is refused before any of them is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fxpipe.errors import PlanError
from fxpipe.pipe.ranks.process_group import find_world

TWO = ("cpu:0", "cpu:1")


def test_one_process_is_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_world(2) is None
    assert find_world(["cpu", "cpu"]) is None
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert find_world(2) is None


def test_a_start_that_torchrun_may_repeat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that meets the other ranks as torch does is told, once it may be started again."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
        assert find_world(1, dist.group.WORLD, timeout=20) is not None
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
        with pytest.warns(UserWarning, match=r"init_method='fxpipe://'\), or leave it out"):
            find_world(1, dist.group.WORLD, timeout=20)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"timeout": 0}, "timeout is 0: write a number of seconds"), ({"group": object()}, "no process group is init")],
)
def test_what_makes_no_world(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_world(2, **asked)
