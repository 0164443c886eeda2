"""Finds which rank is lost, so that all ranks report the same one. They exchange what they see through the store of the
process group.

What a rank sees need not be the cause. A rank that times out may have waited for a rank that itself waits for a third;
and a rank that times out closes its connections (gloo does), so others take it for gone. So each rank writes what it
has seen, gives the others time to do the same, and follows the chain of their words:

    rank 3 sees that 2 is gone; 2 has waited for 1; 1 has written nothing: rank 1 does not answer

The verdict of the first rank that is done is the verdict of all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from fxpipe.engines.transports.open_pipes import LEFT
from fxpipe.engines.transports.tcp_peer import TcpPeer

PAUSE = 0.05  # seconds
GONE = 2.0  # seconds within which a rank that closed its connection after a timeout would have written so
ANSWER = 3.0  # seconds within which a store answers unless its process stands still


class Lost(Exception):
    """A rank is gone, or does not answer."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank

    @property
    def alive(self) -> bool:
        """Whether the rank has only closed a pipe, so that all may meet again."""
        return LEFT in str(self)


def timed_out(error: Exception | str) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def said_by(peer: TcpPeer) -> Lost | None:
    """The loss that a rank has told when it gave up, if it has."""
    with suppress(RuntimeError):  # it has ended: perhaps nothing is missing of it
        while peer.read():
            pass
    culprit, _, why = (peer.closed or "").partition(" ")
    return Lost(int(culprit), why) if peer.closed is not None else None


def blame(store: Any, rank: int, peer: int, reason: str, late: bool, patience: float) -> tuple[int, str]:
    """The rank that all ranks blame, and why. This rank has seen that `peer` is lost, for this `reason`; `late`: a wait
    for it timed out. `patience`: the seconds to wait for the words of others. If the store does not answer, the result
    is what this rank has seen."""
    own, found = f"{peer} {reason}", SimpleQueue[str]()

    def ask() -> None:
        try:
            word = last_word(store, rank, own, late, patience)
            found.put(store.compare_set("lost", "", word).decode())
        except RuntimeError:  # the store is gone
            found.put(own)

    Thread(target=ask, daemon=True).start()  # a store in a process that stands still never answers
    try:
        known = found.get(timeout=2 * patience + ANSWER)
    except Empty:
        known = own
    culprit, _, why = known.partition(" ")
    return int(culprit), why


def silent(store: Any, rank: int, ranks: Sequence[int], patience: float) -> int:
    """Of ranks that have waited for each other in one call, which timed out, the first one that does not say so within
    `patience` seconds; if all do, the first other one. All but that one make this call."""
    others = [other for other in ranks if other != rank]
    end = time.monotonic() + patience
    try:
        store.set(f"waits/{rank}", "")
        while missing := [other for other in others if not store.check([f"waits/{other}"])]:
            if time.monotonic() > end:
                return missing[0]
            time.sleep(PAUSE)
    except RuntimeError:  # the store is gone
        pass
    return others[0]


def last_word(store: Any, rank: int, own: str, late: bool, patience: float) -> str:
    """Follow the chain of ranks that have waited for each other, from this rank on: the word of the last one."""
    store.set(f"seen/{rank}", own)
    end = time.monotonic() + (patience if late else min(GONE, patience))
    while time.monotonic() < end and not store.check(["lost"]):
        if not late and store.check([f"seen/{blamed(own)}"]):  # the blamed rank is alive, and waits itself
            late, end = True, time.monotonic() + patience
        time.sleep(PAUSE)
    passed, word = {rank}, own
    while blamed(word) not in passed and store.check([f"seen/{blamed(word)}"]):
        passed.add(blamed(word))
        word = store.get(f"seen/{blamed(word)}").decode()
    return own if blamed(word) in passed else word


def blamed(word: str) -> int:
    return int(word.partition(" ")[0])
