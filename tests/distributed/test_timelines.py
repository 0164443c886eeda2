"""The timeline of a step over ranks is one, by one clock."""

from __future__ import annotations

import pytest

from tests.distributed import timelines
from tests.distributed.pool import Pool


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_one_timeline(pool: Pool, schedule: str) -> None:
    pool.run(timelines.spread, schedule)


def test_clocks_that_began_at_other_times(pool: Pool) -> None:
    pool.run(timelines.far_apart)
