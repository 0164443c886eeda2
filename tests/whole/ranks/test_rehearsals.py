"""Rehearsals over ranks: all actions are timed, and the model does not notice."""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import rehearsals
from tests.whole.ranks.pool import Pool
from tests.whole.ranks.tensor_parallel import FAR

PAIR = (0, 1)
OPTIONS = (
    ("", {"schedule": "1f1b", "checkpoint": "always"}),
    (FAR, {"schedule": "zb-h1", "checkpoint": "never", "deferred_batch_norm": True}),
)


@pytest.mark.parametrize(("mode", "options"), mostly_slow(OPTIONS, OPTIONS[0].__eq__))
def test_the_model_does_not_notice(pool: Pool, mode: str, options: dict[str, object]) -> None:
    pool.run(partial(rehearsals.the_model_does_not_notice, mode=mode, **options), ranks=PAIR)


@pytest.mark.parametrize(("mode", "schedule"), mostly_slow([("", "interleaved"), (FAR, "1f1b")], (FAR, "1f1b").__eq__))
def test_each_action_has_a_time_that_the_prediction_uses(pool: Pool, mode: str, schedule: str) -> None:
    pool.run(rehearsals.all_is_timed, mode, schedule, ranks=PAIR)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", FAR])
def test_sums(pool: Pool, mode: str) -> None:
    pool.run(rehearsals.sums_are_timed, mode, ranks=PAIR)


def test_errors(pool: Pool) -> None:
    pool.run(rehearsals.fails, "", ranks=PAIR)
