"""The processes themselves that these tests run on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.whole.ranks.pool import LOST, ConnectionLost, Pool


def lose(group: Any, folder: Path, times: int) -> int:
    """How often a connection was lost before. The other rank waits, as in gloo."""
    if dist.get_rank(group) == 0 and len(list(folder.iterdir())) < times:
        time.sleep(1000)
    if dist.get_rank(group) == 0:
        return times
    (folder / str(time.monotonic_ns())).touch()
    before = len(list(folder.iterdir())) - 1
    if before < times:
        raise RuntimeError(f"Gloo {LOST} with [...] Connection closed by peer")
    return before


@pytest.fixture
def ranks() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def test_a_lost_connection(ranks: Pool, tmp_path: Path) -> None:
    """What torch loses while it makes a group is asked for again, on new ranks; not for ever."""
    pair, before = (2, 3), {process.pid for process in ranks.processes}
    assert ranks.run(lose, tmp_path, 1, ranks=pair) == [1, 1]
    assert not before & {process.pid for process in ranks.processes}
    with pytest.raises(ConnectionLost, match=LOST):
        ranks.run(lose, tmp_path, 100, ranks=pair)
