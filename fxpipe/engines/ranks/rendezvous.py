"""A rendezvous for the ranks of one start of torchrun, without ranks of an earlier start.

torchrun keeps its store over restarts (torch 2.13), so a restarted rank may read the address of a rank that is gone; it
is a race. Here ranks first agree on a part of the store that was never used:

    rank 1 ── hello/1 = a new random number ──▶ rank 0
    rank 1 ◀── answer/number = place ────────── rank 0, which keeps answering until all ranks are there
    rank 1 ── place/here/1 ───────────────────▶ all ranks, which wait for each other

Scripts that initialise torch.distributed themselves meet in the same way, by an address that torch calls this module
for: `init_process_group("nccl", init_method="fxpipe://")`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from fxpipe.engines.transports.patience import Patience
from fxpipe.errors import RankError

LEADER = 0
SCHEME = "fxpipe"
ADDRESS = f"{SCHEME}://"
PAUSE = 0.01  # seconds


_met: list[Any] = []  # the stores that `meet` has given


def store_may_be_stale() -> bool:
    """Whether, if torchrun starts this script again, torch.distributed may read what the ranks of the start before have
    left in the store: torchrun keeps it, and torch.distributed was not initialised by `ADDRESS`, which avoids that."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and not _met


def meet(url: str, timeout: timedelta = timedelta(minutes=5), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """What torch.distributed calls for `ADDRESS`: the store of this start, this rank, and the number of ranks, which
    torchrun tells in the environment."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    _met.append(fresh_store(store, rank, size, timeout.total_seconds()))
    yield _met[-1], rank, size
    raise RankError(
        f"torch.distributed asks for a second rendezvous by {ADDRESS}, which has only one: start all ranks again"
    )


with suppress(RuntimeError):  # registered already, by a module that was loaded anew
    register_rendezvous_handler(SCHEME, meet)  # type: ignore[no-untyped-call]


def fresh_store(store: Any, rank: int, size: int, timeout: float) -> Any:
    """A part of the store that only the ranks of this start use; returns when all of them have come. Raises RankError,
    which names the missing ranks, after `timeout` seconds."""
    own, patience = uuid4().hex, Patience(timeout)
    store.set(f"hello/{rank}", own)
    place = own
    if rank != LEADER:
        wait(lambda: store.check([f"answer/{own}"]), patience, lambda: [LEADER], timeout)
        place = store.get(f"answer/{own}").decode()
    store.set(f"{place}/here/{rank}", "")
    here, answered = [f"{place}/here/{peer}" for peer in range(size)], dict[int, bytes]()

    def all_here() -> bool:
        if rank == LEADER:
            answer(store, own, size, answered)
        return bool(store.check(here))

    wait(all_here, patience, lambda: [peer for peer in range(size) if not store.check([here[peer]])], timeout)
    return PrefixStore(place, store)


def answer(store: Any, place: str, size: int, answered: dict[int, bytes]) -> None:
    """Send the meeting place to the ranks with a new hello; `answered` has the last hello answered, by rank."""
    for peer in range(1, size):
        if store.check([f"hello/{peer}"]) and answered.get(peer) != (hello := store.get(f"hello/{peer}")):
            store.set(f"answer/{hello.decode()}", place)
            answered[peer] = hello


def wait(done: Callable[[], bool], patience: Patience, missing: Callable[[], list[int]], timeout: float) -> None:
    """Wait until `done()`. Raises RankError, which names the ranks in `missing()`, when no patience is left of
    `timeout` seconds."""
    while not done():
        if patience.spent():
            ranks = ", ".join(f"rank {rank}" for rank in missing())
            raise RankError(f"{ranks} did not come in {timeout:g} s, to meet the other ranks of this start")
        time.sleep(PAUSE)
