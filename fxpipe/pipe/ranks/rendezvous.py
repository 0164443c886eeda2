"""Where the ranks of one start find each other, and none of an earlier start.

torchrun keeps its store over restarts (torch 2.13), so a rank that has been started again may read there the address of
one that is gone. It does so or not as it happens to be faster. Here ranks first agree on a part of the store that
nobody has used:

    rank 1 ── hello/1 = a number nobody had ──▶ rank 0
    rank 1 ◀── answer/that number = where ───── rank 0, which goes on answering until all are there
    rank 1 ── where/here/1 ───────────────────▶ all, who wait for each other
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore

from fxpipe.engines.ranks.rank_group import LEADER
from fxpipe.errors import RankError

PAUSE = 0.01  # seconds


def fresh_store(store: Any, rank: int, size: int, timeout: float) -> Any:
    """A part of the store that these ranks of this start have for themselves, once all of them have come. Raises
    RankError, on all others, for those that do not in so many seconds."""
    own, end = uuid4().hex, time.monotonic() + timeout
    store.set(f"hello/{rank}", own)
    place = own
    if rank != LEADER:
        wait(lambda: store.check([f"answer/{own}"]), end, lambda: [LEADER], timeout)
        place = store.get(f"answer/{own}").decode()
    store.set(f"{place}/here/{rank}", "")
    here, answered = [f"{place}/here/{peer}" for peer in range(size)], dict[int, bytes]()

    def all_here() -> bool:
        if rank == LEADER:
            answer(store, own, size, answered)
        return bool(store.check(here))

    wait(all_here, end, lambda: [peer for peer in range(size) if not store.check([here[peer]])], timeout)
    return PrefixStore(place, store)


def answer(store: Any, place: str, size: int, answered: dict[int, bytes]) -> None:
    """Tell those who have said hello since where to meet."""
    for peer in range(1, size):
        if store.check([f"hello/{peer}"]) and answered.get(peer) != (hello := store.get(f"hello/{peer}")):
            store.set(f"answer/{hello.decode()}", place)
            answered[peer] = hello


def wait(done: Callable[[], bool], end: float, missing: Callable[[], list[int]], timeout: float) -> None:
    """Until it is done. Raises RankError that names those who are missing in the end."""
    while not done():
        if time.monotonic() > end:
            ranks = ", ".join(f"rank {rank}" for rank in missing())
            raise RankError(f"{ranks} did not come in {timeout:g} s, to meet the other ranks of this start")
        time.sleep(PAUSE)
