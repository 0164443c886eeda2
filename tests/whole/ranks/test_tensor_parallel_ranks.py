"""Plans with tensor parallelism, and strategies, run over ranks: a step is the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.marks import slow_in_turn
from tests.helpers.rendezvous_group import EAGER, LAZY
from tests.whole.ranks import tensor_parallel
from tests.whole.ranks.pool import Pool, RankFailed
from tests.whole.ranks.tensor_parallel import FAR

PLANS = (
    ("blocks", "a stage of four", ""),
    ("joined", "two stages of two", LAZY),
    ("words", "two replicas of two", ""),
    ("image", "two replicas of two", ""),
    ("blocks", "one stage of two recomputes", ""),
    ("mlp", "one stage of two recomputes", FAR),
    ("mlp", "a stage of four", EAGER),
    ("mlp", "a stage of four", FAR),
    ("blocks", "a stage of four", EAGER),
    ("blocks", "a stage of four", FAR),
    ("mlp", "two, then two replicas", ""),
    ("joined", "one, two, one", FAR),
    ("words", "two replicas, then two", LAZY),
    ("image", "two, then two replicas", ""),
)
PLACED = (("tied transformer", "1f1b", "always"), ("batch norm", "zb-h1", "never"))


def test_two_ranks_share_each_op(pool: Pool) -> None:
    pool.run(tensor_parallel.plan_is_the_model, "mlp", "a stage of two", ranks=(0, 1))


@pytest.mark.parametrize(("name", "how", "mode"), slow_in_turn(PLANS, 3))
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
@pytest.mark.parametrize(("name", "mode"), [("mlp", ""), ("mlp", FAR), ("blocks", FAR)])
def test_faults(pool: Pool, name: str, mode: str) -> None:
    pool.run(tensor_parallel.faults_are_told, name, mode)


def test_parts_of_sums(pool: Pool) -> None:
    pool.run(tensor_parallel.odd_parts, ranks=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("mlp", FAR), ("blocks", EAGER)])
def test_a_lost_rank_frees_those_that_wait_for_its_part(name: str, mode: str) -> None:
    ranks = Pool(4)
    try:
        ranks.start(tensor_parallel.lose_one, name, mode, ranks=range(4))
        for rank in (0, 2, 3):
            with pytest.raises(RankFailed, match="rank 1 is gone"):
                ranks.results((rank,), 60)
    finally:
        ranks.close()


@pytest.mark.slow
def test_around_steps(pool: Pool, tmp_path: Path) -> None:
    pool.run(tensor_parallel.kept, tmp_path)


@pytest.mark.slow
def test_rows_of_a_mesh(pool: Pool) -> None:
    pool.run(tensor_parallel.rows_train_together)
