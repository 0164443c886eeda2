"""Where the ranks of one start find each other, and none of an earlier start.

torchrun keeps its store over restarts (torch 2.13), so a rank that has been started again may read there the address of
one that is gone. It does so or not as it happens to be faster. Here ranks first agree on a part of the store that
nobody has used:

    rank 1 ── hello/1 = a number nobody had ──▶ rank 0
    rank 1 ◀── answer/that number = where ───── rank 0, which goes on answering until all are there
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore

PAUSE = 0.01  # seconds


def fresh_store(store: Any, rank: int, size: int, timeout: float) -> Any:
    """A part of the store that these ranks of this start have for themselves. Raises TimeoutError if one of them does
    not come, in so many seconds."""
    own = uuid4().hex
    store.set(f"hello/{rank}", own)
    if rank != 0:
        place = store.get(f"answer/{own}").decode()
        store.set(f"{place}/here/{rank}", "")
        return PrefixStore(place, store)
    answered: dict[int, bytes] = {}
    end = time.monotonic() + timeout
    while not store.check([f"{own}/here/{peer}" for peer in range(1, size)]):
        for peer in range(1, size):
            if store.check([f"hello/{peer}"]) and answered.get(peer) != (hello := store.get(f"hello/{peer}")):
                store.set(f"answer/{hello.decode()}", own)
                answered[peer] = hello
        if time.monotonic() > end:
            raise TimeoutError(f"of {size} ranks, not all have come to meet in {timeout:g} s")
        time.sleep(PAUSE)
    return PrefixStore(own, store)
