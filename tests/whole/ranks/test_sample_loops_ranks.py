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


CASES = [(way, case) for case in ("loops", "lists", "numbers", "counted", "methods") for way in WAYS]


@pytest.mark.filterwarnings("ignore:.* kept whole")
@pytest.mark.parametrize(("way", "case"), mostly_slow(CASES, ("replicas", "counted").__eq__))
def test_steps_are_those_of_the_model(pool: Pool, way: str, case: str) -> None:
    pool.run(sample_loops.as_the_model, WAYS[way], getattr(sample_loops, case), ranks=(0, 1))
