"""The bandwidth between two ranks, from times that a busy machine gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from fxpipe.engines.rehearsal import rank_profiler
from fxpipe.engines.rehearsal.rank_profiler import LARGE, LARGEST, handovers


def world(rank: int, ways: list[SimpleQueue[bytes]], values: list[SimpleQueue[Any]]) -> Any:
    """One of two ranks that share no memory, in threads."""

    def all_gather_object(value: Any) -> list[Any]:
        for way in values:
            way.put((rank, value))
        return [one for _, one in sorted((values[rank].get(timeout=20) for _ in range(2)), key=lambda one: one[0])]

    return SimpleNamespace(
        rank=rank, labels=("cpu:0", "cpu:1"), local_peers={}, all_gather_object=all_gather_object,
        tell=lambda peer, data: ways[peer].put(data), hear=lambda _: ways[rank].get(timeout=20),
    )  # fmt: skip


def measured(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> tuple[float, list[int]]:
    """The bandwidth, and the sizes of the messages that were measured, if each takes these seconds, by its bytes."""
    sizes = dict[int, None]()

    def taken(world: Any, peer: int, data: bytes) -> float:
        if world.rank > peer:
            return 0.0
        sizes[len(data)] = None
        return seconds.get(len(data), 0.5)

    monkeypatch.setattr(rank_profiler, "_round", taken)
    ways, values = [SimpleQueue[bytes]() for _ in range(2)], [SimpleQueue[Any]() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        (link,), other = pool.map(lambda rank: handovers(world(rank, ways, values)), range(2))
    assert other == (link,)
    return link.bandwidth, [*sizes]


def test_larger_messages_until_they_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, {0: 0.25}) == (LARGE / 0.25, [0, LARGE])
    found = measured(monkeypatch, {0: 0.25, LARGE: 0.25, 4 * LARGE: 0.125, 16 * LARGE: 0.75})
    assert found == (16 * LARGE / 0.5, [0, LARGE, 4 * LARGE, 16 * LARGE])


def test_messages_that_never_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they took no time before they are on their way."""
    bandwidth, sizes = measured(monkeypatch, {0: 1.0})
    assert (bandwidth, sizes[-1]) == (LARGEST / 0.5, LARGEST)
