"""Ranks on one machine: how they are connected, and how one waits for another.

    rank 0 ── bytes ──▶ rank 1        values and letters lie in shared memory (`shared_memory.py`)
           ◀── bytes ──
    rank 0 ── bell ───▶ rank 1        an OS pipe: a waiting rank sleeps until another one writes to it ("rings"), or the
                                      process that it waits for has ended

Ranks that do not share memory, as they are on different machines or on one that does not let them, use TCP
(`tcp_peer.py`) for letters and for values of at most `SMALL` bytes, and gloo for larger values.
"""

from __future__ import annotations

import os
import platform
import select
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from .shared_memory import SIZE, SharedBuffer

SWITCH = "FXPIPE_SHARED_MEMORY"  # environment variable; 0: ranks on one machine use TCP and gloo, too
SPIN = 1e-3  # seconds of busy waiting before a rank sleeps; to be woken takes a tenth of that
LISTEN = 1.0  # seconds after which a sleeping rank checks, even if no other has rung


@dataclass(frozen=True)
class BufferOffer:
    """What a rank offers the others to open.

    - `process`: its process id.
    - `bell`: the file descriptor on which the others ring.
    - `boards`: the file descriptors of the memory that it reads, by the rank that writes there.
    """

    process: int
    bell: int
    boards: Mapping[int, int]


class LocalPeer:
    """Another rank on this machine. `out`, `into`: the shared memory to it and from it."""

    def __init__(self, out: SharedBuffer, into: SharedBuffer, bell: int, life: int, own_bell: int, spin: float) -> None:
        self.out, self.into = out, into
        self._bell, self._life, self._own_bell, self._spin = bell, life, own_bell, spin
        self._poll = select.poll()
        for file in (own_bell, life):
            self._poll.register(file, select.POLLIN)

    def begin(self, step: int) -> None:
        """Begin a step, with a number that no step had before."""
        self.out.begin(step)
        self.into.begin(step)

    def ring(self) -> None:
        """Wake the other rank, if it sleeps."""
        with suppress(BlockingIOError, BrokenPipeError):  # its OS pipe is full of unread rings, or it is gone
            os.write(self._bell, b"!")

    def close(self) -> None:
        """Tell the other rank that nothing more will be sent."""
        self.out.close()
        self.ring()

    def wait(self, there: Callable[[], bool], limit: float) -> None:
        """Wait until `there()` is true. Raises RuntimeError if the other rank has ended or closed the connection, or
        after `limit` seconds."""
        if there():
            return
        end = perf_counter() + self._spin
        while perf_counter() < end:
            if there():
                return
            os.sched_yield()
        end = monotonic() + limit
        while True:
            with suppress(BlockingIOError):
                os.read(self._own_bell, 4096)  # before `there()`: a ring after it wakes the poll below
            if there():
                return
            if self.into.closed():
                raise RuntimeError("the other rank has closed its connection")
            left = end - monotonic()
            if left <= 0:
                raise RuntimeError("timed out")
            events = self._poll.poll(1 + 1e3 * min(left, LISTEN))
            if any(file == self._life for file, _ in events) and not there():
                raise RuntimeError("the other rank has closed its connection: it has ended")


def machine() -> tuple[str, ...] | None:
    """A key that is equal for processes that can share memory and see each other: boot id, and pid and network
    namespaces. None if this platform is not supported, or `SWITCH` is 0."""
    # x86-64 keeps the order of stores; elsewhere a stamp might be seen before the data that it stands for.
    if platform.machine() not in ("x86_64", "AMD64") or not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return None
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, *(os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net"))
    except OSError:
        return None


def neighbours(rank: int, collect: Callable[[Any], list[Any]]) -> dict[int, LocalPeer]:
    """The other ranks on this machine. All ranks make this call; `collect` exchanges the values of all ranks."""
    machines = collect(machine())
    if all(its is None or machines.count(its) == 1 for its in machines):
        return {}
    others = [other for other, its in enumerate(machines) if other != rank and its == machines[rank] is not None]
    with ExitStack() as stack:
        try:
            hears, rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # both ends stay open: no end of file is ever seen
            files = {other: new_memory(f"fxpipe-{other}-{rank}", stack) for other in others}
            into = {other: SharedBuffer(file) for other, file in files.items()}
            offer = BufferOffer(os.getpid(), rings, files)
        except OSError:
            offer = None
        offers: list[BufferOffer | None] = collect(offer)
        spin = SPIN if len(others) < len(os.sched_getaffinity(0)) else 0.0
        found = {}
        for other in others if offer else ():
            with suppress(OSError):
                found[other] = opened(offers[other], rank, into[other], hears, spin)
        reached: list[set[int]] = collect(set(found))
    return {other: local_peer for other, local_peer in found.items() if rank in reached[other]}


def new_memory(name: str, stack: ExitStack) -> int:
    """An anonymous file in memory, of `SIZE` bytes, that is closed with the stack."""
    file = os.memfd_create(name)
    stack.callback(os.close, file)
    os.truncate(file, SIZE)
    return file


def opened(offer: BufferOffer | None, rank: int, into: SharedBuffer, hears: int, spin: float) -> LocalPeer:
    """The connection to a rank by its offer. Raises OSError if there is none, or the machine denies access."""
    if offer is None:
        raise OSError("it shares no memory")
    with ExitStack() as stack:
        life = os.pidfd_open(offer.process)
        stack.callback(os.close, life)
        bell = os.open(f"/proc/{offer.process}/fd/{offer.bell}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, bell)
        file = os.open(f"/proc/{offer.process}/fd/{offer.boards[rank]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = LocalPeer(SharedBuffer(file), into, bell, life, hears, spin)
        finally:
            os.close(file)
        stack.pop_all()
    return found
