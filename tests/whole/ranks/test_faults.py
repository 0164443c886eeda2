"""Whatever fails on a rank, in any action: every rank ends with an error that says where, soon, and no gradient has
changed. After an error the pipe works; after the loss of a rank it says so."""

from __future__ import annotations

import re
import time

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import cases
from tests.whole.ranks.pool import Pool, RankFailed

ALL = (0, 1, 2, 3)
SOON = 60  # seconds, on a machine that is busy


@pytest.mark.parametrize("schedule", mostly_slow(["1f1b", "zb-h1"], "zb-h1".__eq__))
def test_an_error_in_any_action(pool: Pool, schedule: str) -> None:
    pool.run(cases.fail_everywhere, schedule)


@pytest.mark.slow
def test_ranks_that_differ(pool: Pool) -> None:
    pool.run(cases.differ)


@pytest.mark.slow
def test_an_error_in_any_action_of_replicas(pool: Pool) -> None:
    pool.run(cases.fail_everywhere, "1f1b", (2, 2))


@pytest.mark.parametrize(
    ("end", "action", "replicas", "far"),
    [
        ("kill", "1F2", None, ()),
        pytest.param("stop", "1F2", None, (), marks=pytest.mark.slow),
        pytest.param("kill", "0B1", (2, 1), (0, 1, 2), marks=pytest.mark.slow),
        pytest.param("kill", "0B1", (2, 1), (), marks=pytest.mark.slow),
        pytest.param("kill", "1F2", None, (0, 1, 2), marks=pytest.mark.long),
        pytest.param("stop", "1F2", None, (0, 1, 2), marks=pytest.mark.slow),
        pytest.param("stop", "1F2", None, (2,), marks=pytest.mark.long),
    ],
)
def test_a_rank_is_lost(end: str, action: str, replicas: tuple[int, ...] | None, far: tuple[int, ...]) -> None:
    """Ranks of its own, for they end. Those that are far share no memory with others."""
    ranks = Pool(3)
    try:
        ranks.start(cases.lose, end, action, replicas, far, ranks=(0, 1, 2))
        began = time.monotonic()
        for rank in (0, 2):
            with pytest.raises((RankFailed, EOFError)) as caught:
                ranks.results((rank,), SOON)
            assert "RankError: rank 1 " + ("is gone" if end == "kill" else "did not answer for 10 s") in str(
                caught.value
            )
            # What did not come, or was not taken.
            assert re.search(
                r"stage [01], (replica 1, )?micro-batch [1-3], (the gradient of )?\w+, at cases.py:", str(caught.value)
            )
        assert time.monotonic() - began < SOON
    finally:
        ranks.close()
