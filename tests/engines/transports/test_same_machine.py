"""Ranks on one machine find each other, wake each other, and see when another has ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fxpipe.engines.transports import same_machine
from fxpipe.engines.transports.same_machine import LocalPeer, machine, neighbours

needs_memory = pytest.mark.skipif(machine() is None, reason="this machine lets processes share no memory")


def meet(count: int, find: Callable[..., dict[int, LocalPeer]] = neighbours) -> list[dict[int, LocalPeer]]:
    """What each of so many ranks finds, which are threads here."""
    barrier, said = threading.Barrier(count), {}

    def collect(rank: int, value: Any) -> list[Any]:
        said[rank] = value
        barrier.wait()
        found = [said[other] for other in range(count)]
        barrier.wait()
        return found

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: find(rank, lambda value: collect(rank, value)), range(count)))


@needs_memory
def test_ranks_of_one_machine_find_each_other() -> None:
    found = meet(3)
    assert [sorted(local_peer) for local_peer in found] == [[1, 2], [0, 2], [0, 1]]
    for rank, others in enumerate(found):
        for other, there in others.items():
            there.out.write(f"from {rank} to {other}".encode())
    for rank, others in enumerate(found):
        for other, there in others.items():
            assert there.into.read(1).rstrip(b"\0").decode() == f"from {other} to {rank}"


@pytest.mark.parametrize(
    ("machines", "wanted"),
    [
        ([("a",), ("b",)], [[], []]),
        ([None, None], [[], []]),
        ([("a",), None, ("a",)], [[2], [], [0]]),
        ([("a",), ("b",), ("a",), ("b",)], [[2], [3], [0], [1]]),
    ],
)
@needs_memory
def test_others_do_not(
    machines: list[tuple[str] | None], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(rank: int, collect: Callable[[Any], list[Any]]) -> dict[int, LocalPeer]:
        ranks.append(rank)
        return neighbours(rank, lambda value: collect(machines[rank] if value == "mine" else value))

    ranks: list[int] = []
    monkeypatch.setattr(same_machine, "machine", lambda: "mine")
    assert [sorted(others) for others in meet(len(machines), find)] == wanted


@needs_memory
def test_whom_a_rank_cannot_reach_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = same_machine.opened

    def closed_to_one(offer: Any, rank: int, *args: Any) -> LocalPeer:
        if rank == 1:
            raise PermissionError("not allowed")
        return opened(offer, rank, *args)

    monkeypatch.setattr(same_machine, "opened", closed_to_one)
    assert [sorted(others) for others in meet(3)] == [[2], [], [0]]


@needs_memory
def test_a_machine_that_gives_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(same_machine, "new_memory", refuse)
    assert meet(2) == [{}, {}]


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(same_machine.SWITCH, "0")
    assert machine() is None


@pytest.mark.parametrize("spin", [0.0, 1e-3])
@needs_memory
def test_who_waits_is_woken(spin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_machine, "SPIN", spin)
    here, there = (others[other] for others, other in zip(meet(2), (1, 0), strict=True))

    def answer() -> None:
        for number in range(1, 30):
            there.wait(lambda number=number: there.into.has(number), 60)
            there.out.write(b"answer")
            there.ring()

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(1, 30):
        if number % 10 == 0:
            time.sleep(0.01)  # the other one sleeps
        here.out.write(b"question")
        here.ring()
        here.wait(lambda number=number: here.into.has(number), 60)
    thread.join()


@needs_memory
def test_nothing_comes() -> None:
    here = meet(2)[0][1]
    with pytest.raises(RuntimeError, match="timed out"):
        here.wait(lambda: False, 0.02)


@needs_memory
def test_the_other_closes() -> None:
    here, there = (others[other] for others, other in zip(meet(2), (1, 0), strict=True))
    there.out.write(b"last words")
    there.close()
    here.wait(lambda: here.into.has(1), 60)  # what has come counts
    with pytest.raises(RuntimeError, match="closed its connection"):
        here.wait(lambda: here.into.has(2), 60)


@needs_memory
def test_the_other_ends() -> None:
    hears, _ = os.pipe2(os.O_NONBLOCK)
    process = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "0.2")
    life = os.pidfd_open(process)
    into = meet(2)[0][1].into
    with pytest.raises(RuntimeError, match="it has ended"):
        LocalPeer(into, into, -1, life, hears, 0.0).wait(lambda: False, 60)
    os.waitpid(process, 0)
    os.close(life)
