"""Ranks that are started again meet each other, whatever those before them have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from fxpipe.engines.ranks.rendezvous import fresh_store
from fxpipe.errors import RankError
from tests.helpers.marks import mostly_slow

SIZE = 3


def test_a_second_start_sees_nothing_of_the_first(tmp_path: Path) -> None:
    stores = [dist.FileStore(str(tmp_path / "store"), SIZE) for _ in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as ranks:
        for start in range(5):  # in each, the leader is the last or the first to come
            order = range(SIZE) if start % 2 else reversed(range(SIZE))
            waiting = {rank: ranks.submit(fresh_store, stores[rank], rank, SIZE, 20) for rank in order}
            met = {rank: future.result(30) for rank, future in waiting.items()}
            assert not met[1].check(["address"])
            met[0].set("address", str(start))
            assert {met[rank].get("address") for rank in range(SIZE)} == {str(start).encode()}


@pytest.mark.parametrize("missing", mostly_slow(range(SIZE), (1).__eq__))
def test_a_rank_that_does_not_come(missing: int, tmp_path: Path) -> None:
    """All others name it."""
    others = [rank for rank in range(SIZE) if rank != missing]
    stores = [dist.FileStore(str(tmp_path / "store"), SIZE) for _ in others]
    with ThreadPoolExecutor(SIZE) as ranks:
        waiting = [ranks.submit(fresh_store, store, rank, SIZE, 1) for rank, store in zip(others, stores, strict=True)]
        for future in waiting:
            with pytest.raises(RankError, match=rf"rank {missing} did not come in 1 s, to meet the other ranks"):
                future.result(30)
