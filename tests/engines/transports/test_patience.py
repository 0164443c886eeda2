"""What counts as waiting."""

from __future__ import annotations

import pytest

from fxpipe.engines.transports import patience
from fxpipe.engines.transports.patience import Patience


def test_only_time_between_two_looks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(patience, "monotonic", lambda: now)
    found = Patience(5.0, now)
    for seconds, left in ((1.5, 3.5), (3600.0, 1.5), (1.0, 0.5)):  # in the second one the machine was suspended
        now += seconds
        assert not found.spent()
        assert found.left == left
    now += 0.5
    assert found.spent()


def test_none_is_spent_at_once() -> None:
    assert Patience(0.0).spent()
