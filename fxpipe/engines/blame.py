"""Which rank is lost, so that all say the same: who sees it leaves word in the store of the process group.

The first word counts, for a rank that fails by it goes in turn. And one that waits too long need not wait for the rank
that is to blame: it says for whom, gives all others time to say so too, and follows what they have said.

    rank 3 waits for 2, which waits for 1, which waits for nobody: rank 1 does not answer
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

PAUSE = 0.05  # seconds
ANSWER = 3.0  # seconds, in which a store answers whose process does not stand still


def blame(store: Any, rank: int, peer: int, reason: str, patience: float) -> tuple[int, str]:
    """Whom all blame, and why. This rank has seen that `peer` is lost; `patience`: seconds for others to say for whom
    they have waited too long, 0 if `peer` is gone for certain. Where the store does not answer, there is no other word
    than one's own."""
    own, found = f"{peer} {reason}", SimpleQueue[str]()

    def ask() -> None:
        try:
            culprit = waited(store, rank, peer, patience) if patience else peer
            found.put(store.compare_set("lost", "", f"{culprit} {reason}").decode())
        except RuntimeError:  # the store is gone
            found.put(own)

    Thread(target=ask, daemon=True).start()  # a store may be in a process that stands still: it never answers
    try:
        known = found.get(timeout=patience + ANSWER)
    except Empty:
        known = own
    culprit, _, why = known.partition(" ")
    return int(culprit), why


def waited(store: Any, rank: int, peer: int, patience: float) -> int:
    """The rank at the end of those that have waited for each other."""
    store.set(f"late/{rank}", str(peer))
    end = time.monotonic() + patience
    while time.monotonic() < end and not store.check(["lost"]):
        time.sleep(PAUSE)
    passed, last = {rank}, peer
    while last not in passed and store.check([f"late/{last}"]):
        passed.add(last)
        last = int(store.get(f"late/{last}"))
    return peer if last in passed else last
