"""Ctrl-C on a rank, wherever it comes: all ranks hear of it soon, nobody waits for the timeout, and the next step is
right."""

from __future__ import annotations

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import press_points
from tests.whole.ranks.interrupt_soak import HEARD, load, soak
from tests.whole.ranks.pool import Pool

MODES = [(far, presses) for far in (False, True) for presses in (1, 2)]


@pytest.mark.parametrize(("far", "presses"), mostly_slow(MODES, lambda mode: mode == (False, 1)))
def test_at_each_place_of_a_step(pool: Pool, far: bool, presses: int) -> None:
    pool.run(press_points.press_everywhere, far, presses, ranks=(0, 1))


@pytest.mark.slow
def test_at_each_place_of_a_first_step(pool: Pool) -> None:
    pool.run(press_points.press_in_first_steps, ranks=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_while_a_rank_waits_for_a_call(pool: Pool, presses: int) -> None:
    pool.run(press_points.wait_alone, presses, ranks=(0, 1))


@pytest.mark.slow
def test_the_third(pool: Pool) -> None:
    pool.run(press_points.press_thrice, ranks=(0, 1))


@pytest.mark.long
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_at_random_moments(ranks: int, far: bool) -> None:
    with load(4):
        outcomes = list(soak(ranks, 60, far))
    assert not [one for one in outcomes if one.wrong or one.seconds > HEARD]
