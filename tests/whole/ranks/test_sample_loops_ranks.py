"""Models that go through their samples one by one, or take lists of samples, over ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import sample_loops
from tests.whole.ranks.pool import Pool

WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"devices": 2, "chunks": 3, "schedule": "1f1b"},
    "code": {"devices": 2, "chunks": 2, "schedule": "zb-h1", "backward": "code"},
    "replicas": {"devices": 2, "chunks": 2, "replicas": (2,)},
}


CASES = [(way, lists) for lists in (False, True) for way in WAYS]


@pytest.mark.filterwarnings("ignore:.* kept whole")
@pytest.mark.parametrize(("way", "lists"), mostly_slow(CASES, lambda case: case in (("1f1b", False), ("code", True))))
def test_steps_are_those_of_the_model(pool: Pool, way: str, lists: bool) -> None:
    pool.run(sample_loops.as_the_model, WAYS[way], lists, ranks=(0, 1))


@pytest.mark.parametrize("way", mostly_slow(sorted(WAYS), "1f1b".__eq__))
def test_numbers_of_their_own(pool: Pool, way: str) -> None:
    pool.run(sample_loops.with_numbers, WAYS[way], ranks=(0, 1))
