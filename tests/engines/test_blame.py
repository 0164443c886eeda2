"""All ranks name the same one as lost, and no store keeps them from it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from fxpipe.engines import blame as blaming
from fxpipe.engines.blame import blame

LATE, GONE = "did not answer for 4 s", "is gone"
PATIENCE = 1.0  # seconds


def blamed(waits: dict[int, int], store: Any = None) -> set[tuple[int, str]]:
    """What ranks say that have waited for others in vain, all at once."""
    store = store or dist.HashStore()
    with ThreadPoolExecutor(len(waits)) as ranks:
        said = [ranks.submit(blame, store, rank, peer, LATE, PATIENCE) for rank, peer in waits.items()]
        return {future.result() for future in said}


def test_the_last_of_those_who_wait_for_each_other() -> None:
    assert blamed({0: 1, 1: 2, 3: 2, 4: 3}) == {(2, LATE)}
    assert blamed({3: 2}) == {(2, LATE)}


def test_in_a_ring_one_of_them() -> None:
    assert len(blamed({0: 1, 1: 2, 2: 0})) == 1


def test_the_first_word_counts() -> None:
    store = dist.HashStore()
    assert blame(store, 0, 1, GONE, 0) == (1, GONE)
    assert blame(store, 2, 0, GONE, 0) == (1, GONE)
    assert blame(store, 3, 2, LATE, 60) == (1, GONE)  # at once


def gone() -> None:
    raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("answer", [gone, Event().wait])
def test_a_store_that_is_gone_or_stands_still(answer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            answer()
            return b""

    monkeypatch.setattr(blaming, "ANSWER", 0.1)
    assert blame(Store(), 0, 1, GONE, 0) == (1, GONE)
