"""The pipes that share the connections of a rank: which one is being called, and which ones this rank has closed.

Each letter says which pipe it is of. So a rank that calls a pipe which another one has left hears of it with the next
letter, or, if it waits for something else, by what that rank said when it left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from fxpipe.runtime.interrupts import Interrupts, ignore

from .tcp_peer import TcpPeer

LEFT = "has closed this pipe"
TAG = 4  # bytes of a letter that say which pipe it is of


@dataclass(eq=False)
class OpenPipes:
    """The pipes as one rank sees them, numbered on all ranks alike.

    - `rank`: this rank; `tcp_peers`: the connections, by which the other ranks say that they have left.
    - `made`: how many there are; `calling`: the number of the one that is being called, or None.
    - `left`: those that this rank has closed, and why: the text of an error, or nothing.
    - `process`: the id of this rank's process; a fork of it says nothing.
    """

    rank: int
    tcp_peers: Mapping[int, TcpPeer]
    made: int = 0
    calling: int | None = None
    left: dict[int, str] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)

    def make(self) -> int:
        """The number of a new pipe."""
        self.made += 1
        return self.made

    def leave(self, number: int, why: str = "") -> None:
        """Let the other ranks know that this one has closed the pipe with this number: one that is calling it, or calls
        it later, does not wait. `why`: the error that was the reason, if there was one."""
        with Interrupts(ignore):
            self.left[number] = why
            if os.getpid() == self.process:
                for tcp_peer in self.tcp_peers.values():
                    tcp_peer.leave(number, why)

    @property
    def tag(self) -> bytes:
        """What letters begin with: the number of the pipe that is being called; 0 while one is made."""
        return (self.calling or 0).to_bytes(TAG, "little")

    def left_by(self, peer: int) -> str | None:
        """What is said of a rank that has closed the pipe that is being called; None if it has not."""
        left = self.tcp_peers[peer].left
        return left_text(peer, left[self.calling]) if self.calling in left else None

    def elsewhere(self, peer: int, tag: bytes) -> tuple[int, str]:
        """Which rank has left, and what is said of it, after a letter from another pipe: this rank if it has closed
        that pipe, else the sender."""
        pipe = int.from_bytes(tag, "little")
        if pipe in self.left:
            return self.rank, left_text(self.rank, self.left[pipe])
        with suppress(RuntimeError):
            self.tcp_peers[peer].read()
        return peer, self.left_by(peer) or left_text(peer, "")


def divided(letter: bytes) -> tuple[bytes, bytes]:
    """The tag of a letter, and the rest."""
    return letter[:TAG], letter[TAG:]


def left_text(rank: int, why: str) -> str:
    """What is said of a rank that has closed a pipe which others still call.

    >>> left_text(1, "ValueError: no more data")
    'rank 1 has closed this pipe: ValueError: no more data'
    """
    return f"rank {rank} {LEFT}" + (f": {why}" if why else "")
