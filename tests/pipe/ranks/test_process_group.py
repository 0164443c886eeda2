"""At the door to several processes: what is refused before any of them is asked."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.errors import PlanError
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.ranks.process_group import find_world, for_ranks

TWO = ("cpu:0", "cpu:1")


def test_one_process_is_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_world(2) is None
    assert find_world(["cpu", "cpu"]) is None
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert find_world(2) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"timeout": 0}, "timeout is 0: write a number of seconds"), ({"group": object()}, "no process group is init")],
)
def test_what_makes_no_world(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_world(2, **asked)


def test_what_ranks_cannot_do() -> None:
    with pytest.raises(PlanError, match="a strategy is for the devices of one process"):
        for_ranks(Options(TWO, 4, place=lambda graph, sizes: None))
    assert for_ranks(Options(TWO, 4)).ranks
