"""The timeline of a step over ranks is one, by one clock."""

from __future__ import annotations

import pytest

from tests.whole.ranks import timelines
from tests.whole.ranks.pool import Pool


def test_one_timeline(pool: Pool) -> None:
    pool.run(timelines.spread, "zb-h1")


@pytest.mark.slow
def test_clocks_that_began_at_other_times(pool: Pool) -> None:
    pool.run(timelines.far_apart)


@pytest.mark.slow
def test_a_profile(pool: Pool) -> None:
    pool.run(timelines.profiled)
