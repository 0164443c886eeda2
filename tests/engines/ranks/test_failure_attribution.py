"""All ranks name the same one as lost, and no store keeps them from it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from fxpipe.engines.ranks import failure_attribution as blaming
from fxpipe.engines.ranks.failure_attribution import blame, silent

LATE, GONE = "did not answer for 4 s", "is gone"
PATIENCE = 1.0  # seconds


def blamed(seen: dict[int, tuple[int, str]]) -> set[tuple[int, str]]:
    """What ranks say who have seen that others are late or gone, all at once."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(seen)) as ranks:
        said = [
            ranks.submit(blame, store, rank, peer, reason, reason == LATE, PATIENCE)
            for rank, (peer, reason) in seen.items()
        ]
        return {future.result() for future in said}


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({3: (2, LATE)}, marks=pytest.mark.slow),
        {0: (1, LATE), 1: (2, LATE), 3: (2, LATE), 4: (3, LATE)},
        pytest.param({0: (2, LATE), 1: (0, GONE)}, marks=pytest.mark.slow),  # rank 0 has closed its connections
    ],
)
def test_the_last_of_those_who_wait_for_each_other(seen: dict[int, tuple[int, str]]) -> None:
    assert blamed(seen) == {(2, LATE)}


def test_who_is_gone_has_seen_nothing() -> None:
    assert blamed({0: (1, GONE), 2: (1, GONE), 3: (2, LATE)}) == {(1, GONE)}


def test_in_a_ring_one_of_them() -> None:
    assert len(blamed({0: (1, LATE), 1: (2, LATE), 2: (0, GONE)})) == 1


def test_who_does_not_say_that_a_common_call_timed_out() -> None:
    for here, wanted in (((0, 2, 3), {1}), ((0, 1, 2, 3), {0, 1})):
        store = dist.HashStore()
        with ThreadPoolExecutor(len(here)) as ranks:
            said = [ranks.submit(silent, store, rank, range(4), PATIENCE) for rank in here]
            assert {future.result() for future in said} == wanted


def test_the_first_word_counts() -> None:
    store = dist.HashStore()
    assert blame(store, 0, 1, GONE, False, 0) == (1, GONE)
    assert blame(store, 2, 0, GONE, False, 60) == (1, GONE)  # at once
    assert blame(store, 3, 2, LATE, True, 60) == (1, GONE)


def gone() -> None:
    raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("answer", [gone, Event().wait])
def test_a_store_that_is_gone_or_stands_still(answer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def set(self, key: str, value: str) -> None:
            answer()

    monkeypatch.setattr(blaming, "ANSWER", 0.1)
    assert blame(Store(), 0, 1, GONE, False, 0) == (1, GONE)
