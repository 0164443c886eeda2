"""Plans with tensor parallelism, and strategies, run over ranks: a step is the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rendezvous_group import EAGER, LAZY
from tests.whole.ranks import tensor_parallel
from tests.whole.ranks.pool import Pool

PLANS = (
    ("blocks", "a stage of four", ""),
    ("joined", "two stages of two", LAZY),
    ("words", "two replicas of two", ""),
    ("image", "two replicas of two", ""),
    ("mlp", "a stage of four", EAGER),
)
PLACED = (("tied transformer", "1f1b", "always"), ("batch norm", "zb-h1", "never"))


def test_two_ranks_share_each_op(pool: Pool) -> None:
    pool.run(tensor_parallel.plan_is_the_model, "mlp", "a stage of two", ranks=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how", "mode"), PLANS)
def test_plans(pool: Pool, name: str, how: str, mode: str) -> None:
    pool.run(tensor_parallel.plan_is_the_model, name, how, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "checkpoint"), PLACED)
def test_ops_run_anywhere(pool: Pool, name: str, schedule: str, checkpoint: str) -> None:
    pool.run(tensor_parallel.ops_run_anywhere, name, schedule, checkpoint, ranks=(0, 1, 2))


@pytest.mark.slow
def test_strategies(pool: Pool) -> None:
    pool.run(tensor_parallel.strategies_are_the_model)


@pytest.mark.slow
def test_random_numbers(pool: Pool) -> None:
    pool.run(tensor_parallel.draws_as_in_one_process)


@pytest.mark.slow
def test_faults(pool: Pool) -> None:
    pool.run(tensor_parallel.faults_are_told)


@pytest.mark.slow
def test_around_steps(pool: Pool, tmp_path: Path) -> None:
    pool.run(tensor_parallel.kept, tmp_path)


@pytest.mark.slow
def test_rows_of_a_mesh(pool: Pool) -> None:
    pool.run(tensor_parallel.rows_train_together)
