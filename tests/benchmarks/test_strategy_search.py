"""The tables of found strategies, for a small network and a moment of searching."""

from __future__ import annotations

from itertools import count

import pytest

pytest.importorskip("numba")

import fxpipe.planning.operators.strategy_search
from benchmarks import strategy_search
from benchmarks.strategy_search import HEADS, against_data_parallel, compare, published
from fxpipe.planning.operators.models.convolutional_networks import alexnet


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_search, "MODELS", {"alexnet": lambda: alexnet(16, width=4, hidden=64)})


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second passes between two looks at the clock: a search tries as much on a machine that is busy."""
    ticks = count()
    for module in (strategy_search, fxpipe.planning.operators.strategy_search):
        monkeypatch.setattr(module, "monotonic", lambda: next(ticks) / 10)


@pytest.mark.slow
def test_beside_the_published_chain() -> None:
    _, row, (last,) = compare(["alexnet"], [4], seconds=40, seeds=1)
    assert row[:2] == ("alexnet", "4")
    assert row[-1] in ("better", "the same")
    assert last.startswith("leaps: worse in 0 of 1 cells")


@pytest.mark.slow
def test_beside_data_parallelism() -> None:
    row = against_data_parallel("alexnet", "p100:4", published("p100:4", effective=True), seconds=40)
    assert len(row) == len(HEADS)
    assert 1 <= float(row[5]) <= float(row[6])


def test_effective_links_are_slower() -> None:
    rates = [[switch.bandwidth for switch in published("k80:8", effective).switches] for effective in (True, False)]
    assert all(slow < fast for slow, fast in zip(*rates, strict=True))
