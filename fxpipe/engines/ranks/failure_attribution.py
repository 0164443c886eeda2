"""Which rank is lost, so that all say the same: who sees it leaves word in the store of the process group.

What a rank sees need not be what has happened. One that waits too long may wait for a rank that itself waits for a
third; and one that has waited too long closes its connections (gloo does), so that others take it for gone. So each
says what it has seen, gives all others time to say so too, and follows what they have said:

    rank 3 sees that 2 is gone, which has waited for 1, which has said nothing: rank 1 does not answer

The first to come to an end decides for all.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

PAUSE = 0.05  # seconds
GONE = 2.0  # seconds, in which a rank whose connection is closed would have said that it has waited too long
ANSWER = 3.0  # seconds, in which a store answers whose process does not stand still


def blame(store: Any, rank: int, peer: int, reason: str, late: bool, patience: float) -> tuple[int, str]:
    """Whom all blame, and why. This rank has seen that `peer` is lost, for this reason; `late`: it has waited for it,
    and `patience` is in how many seconds others would say that they have waited as long. Where the store does not
    answer, what is seen here is all that is known."""
    own, found = f"{peer} {reason}", SimpleQueue[str]()

    def ask() -> None:
        try:
            word = last_word(store, rank, own, late, patience)
            found.put(store.compare_set("lost", "", word).decode())
        except RuntimeError:  # the store is gone
            found.put(own)

    Thread(target=ask, daemon=True).start()  # a store may be in a process that stands still: it never answers
    try:
        known = found.get(timeout=2 * patience + ANSWER)
    except Empty:
        known = own
    culprit, _, why = known.partition(" ")
    return int(culprit), why


def last_word(store: Any, rank: int, own: str, late: bool, patience: float) -> str:
    """What the last has seen of those who have waited for each other, this rank first."""
    store.set(f"seen/{rank}", own)
    end = time.monotonic() + (patience if late else min(GONE, patience))
    while time.monotonic() < end and not store.check(["lost"]):
        if not late and store.check([f"seen/{blamed(own)}"]):  # it is there, and waits
            late, end = True, time.monotonic() + patience
        time.sleep(PAUSE)
    passed, word = {rank}, own
    while blamed(word) not in passed and store.check([f"seen/{blamed(word)}"]):
        passed.add(blamed(word))
        word = store.get(f"seen/{blamed(word)}").decode()
    return own if blamed(word) in passed else word


def blamed(word: str) -> int:
    return int(word.partition(" ")[0])
