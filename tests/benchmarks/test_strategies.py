"""The benchmark of strategies: it says what it should, at sizes that say nothing about time."""

from __future__ import annotations

import pytest

from benchmarks import strategies
from benchmarks.strategies import Result, table, trials, verdict

SMALL = {
    "alexnet": lambda: strategies.alexnet(width=2, hidden=8, size=63, rows=4),
    "resnet": lambda: strategies.resnet(width=2, size=33, rows=4),
    "rnntc": lambda: strategies.rnntc(width=8, layers=1, steps=2, rows=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", SMALL)
def test_every_strategy_is_simulated_and_measured(model: str) -> None:
    assert set(SMALL) == set(strategies.cases())
    results = trials(SMALL[model](), rounds=1, drawn=0)
    assert len(results) == 4
    assert min(seconds for one in results for seconds in (one.simulated, one.measured)) > 0
    assert len({one.simulated for one in results}) > 2


def test_what_is_said_of_the_results() -> None:
    results = [Result("a", 1.0, 1.2), Result("b", 1.05, 1.1), Result("c", 2.0, 1.15)]
    assert list(verdict(results)) == [
        "2 of 3 within 30%",
        "1 of 2 pairs that differ by more than 10% are in order",
        "  a is measured 4% slower than c",
    ]
    assert table(results).splitlines()[2].split() == ["a", "1000.0", "1200.0", "0.83"]
