"""Ten thousand steps over ranks: nothing is left of them on any, and nothing hangs."""

from __future__ import annotations

import pytest

from tests.whole.ranks import long
from tests.whole.ranks.pool import Pool


@pytest.mark.long
def test_ten_thousand_steps_leave_nothing(pool: Pool) -> None:
    pool.start(long.many_steps, 300, 10_000, ranks=(0, 1), patience=900)
    pool.results((0, 1), patience=900)


@pytest.mark.slow
def test_some_hundred_steps_of_more_ranks_leave_nothing(pool: Pool) -> None:
    pool.run(long.many_steps, 200, 400)
