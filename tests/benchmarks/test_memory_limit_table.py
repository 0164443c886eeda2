"""The automatic choice is within its limit, and by the prediction not slower than a fixed mode that fits."""

from __future__ import annotations

import pytest

from benchmarks.memory_limit import SHARES, compared


@pytest.mark.slow
def test_within_the_limit_and_not_slower() -> None:
    fixed, chosen = compared("perceptron", "1f1b", 1)
    assert tuple(chosen) == SHARES
    for limit, auto in chosen.values():
        assert auto.most <= limit
        assert all(auto.predicted <= one.predicted * (1 + 1e-9) for one in fixed.values() if one.most <= limit)
