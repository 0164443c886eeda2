"""Replicas that share out the parameters of their stage, as plans with ZeRO-3 say: steps are those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.whole.ranks import sharded_parameters
from tests.whole.ranks.pool import Pool

FAILING = (("op", 1, 0), ("op", 0, 3), ("gather", 2, 5), ("scatter", 3, 2), ("scatter", 0, 7))


def test_steps_are_the_models(pool: Pool) -> None:
    pool.run(sharded_parameters.step_is_the_models, (2, 2), "1f1b", "except_last")


@pytest.mark.slow
def test_a_rank_has_its_share_of_the_parameters(pool: Pool) -> None:
    """Between steps a half, or a fourth, of parameters and gradients; in a step one layer is gathered."""
    assert pool.run(sharded_parameters.memory, (2, 2)) == [(1 / 2, 1, 1 / 2)] * 4
    assert pool.run(sharded_parameters.memory, (4,)) == [(1 / 4, 1, 1 / 4)] * 4


@pytest.mark.slow
def test_around_steps(pool: Pool, tmp_path: Path) -> None:
    pool.run(sharded_parameters.around_steps, tmp_path / "saved", (2, 2), (3, 1))


@pytest.mark.slow
def test_a_failure_ends_the_step_on_all_ranks(pool: Pool) -> None:
    pool.run(sharded_parameters.fails_and_goes_on, (2, 2), FAILING)


@pytest.mark.slow
def test_what_is_refused(pool: Pool) -> None:
    pool.run(sharded_parameters.refused, (1, 2), ranks=(0, 1, 2))


@pytest.mark.slow
def test_a_plan_in_a_file_and_a_model_on_the_meta_device(pool: Pool, tmp_path: Path) -> None:
    pool.run(sharded_parameters.of_a_file, tmp_path, (1, 2), ranks=(0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "schedule", "checkpoint"),
    [((3, 1), "gpipe", "never"), ((4,), "1f1b", "always"), ((2, 2), "1f1b-late", "always")],
)
def test_more_steps(pool: Pool, counts: tuple[int, ...], schedule: str, checkpoint: str) -> None:
    pool.run(sharded_parameters.step_is_the_models, counts, schedule, checkpoint)


@pytest.mark.slow
def test_more_failures(pool: Pool) -> None:
    pool.run(sharded_parameters.fails_and_goes_on, (4,), FAILING)
