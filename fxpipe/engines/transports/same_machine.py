"""The ranks of one machine: what they reach each other by, and how one waits for another.

    rank 0 ── bytes ──▶ rank 1        values and letters lie in memory that both have (`shared_memory.py`)
           ◀── bytes ──
    rank 0 ── bell ───▶ rank 1        a pipe: who has nothing to do sleeps until somebody rings, or the other has ended

Where they are not on one machine, or it does not let them share memory, torch.distributed carries everything.
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

SWITCH = "FXPIPE_SHARED_MEMORY"  # 0: all goes by torch.distributed, on one machine, too
SPIN = 1e-3  # seconds, in which who waits looks again and again: to be woken takes a tenth of that
LISTEN = 1.0  # seconds after which who sleeps has a look, even if nobody has rung


@dataclass(frozen=True)
class BufferOffer:
    """What a rank gives the others to open: the process, its bell, and the boards that it will read, by their
    writers."""

    process: int
    bell: int
    boards: Mapping[int, int]


class LocalPeer:
    """Another rank on this machine. `out`, `into`: the boards to it and from it."""

    def __init__(self, out: SharedBuffer, into: SharedBuffer, bell: int, life: int, own_bell: int, spin: float) -> None:
        self.out, self.into = out, into
        self._bell, self._life, self._own_bell, self._spin = bell, life, own_bell, spin
        self._poll = select.poll()
        for file in (own_bell, life):
            self._poll.register(file, select.POLLIN)

    def ring(self) -> None:
        """Wake it, if it sleeps."""
        with suppress(BlockingIOError, BrokenPipeError):  # it has not heard thousands of rings yet, or is gone
            os.write(self._bell, b"!")

    def close(self) -> None:
        """Let it know that nothing more will come."""
        self.out.close()
        self.ring()

    def wait(self, there: Callable[[], bool], limit: float) -> None:
        """Until it has done something. Raises RuntimeError if it has ended, or nothing comes for so many seconds."""
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
                os.read(self._own_bell, 4096)  # before the look: who rings after it is heard below
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
    """What processes have in common that can share memory and see each other; None where it is not known how to."""
    # Stores are seen in their order on x86-64; elsewhere a stamp might be seen before what it stands for.
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
    """The other ranks on this machine. All ranks make this call; `collect` gives the values of all to all."""
    machines = collect(machine())
    if all(its is None or machines.count(its) == 1 for its in machines):
        return {}
    others = [other for other, its in enumerate(machines) if other != rank and its == machines[rank] is not None]
    with ExitStack() as stack:
        try:
            hears, rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # both stay open: it never looks as if all had gone
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
    """A file that has no place anywhere but in memory, and is closed with the stack."""
    file = os.memfd_create(name)
    stack.callback(os.close, file)
    os.truncate(file, SIZE)
    return file


def opened(offer: BufferOffer | None, rank: int, into: SharedBuffer, hears: int, spin: float) -> LocalPeer:
    """Another rank, by what it offers. Raises OSError where the machine does not let this one in."""
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
