"""A stage may be on several ranks, each of which has a slice of every micro-batch: steps are those of the model, and
the same as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rendezvous_group import LAZY
from tests.whole.ranks import replica_groups
from tests.whole.ranks.pool import Pool

STEPS = (
    ("long skip", (2, 1), "gpipe", "always"),
    ("tied transformer", (2, 2), "1f1b", "except_last"),
    ("tied transformer", (2, 1), "zb-h1", "never"),
    ("tied transformer", (1, 2), "zb-h1", "except_last"),
    ("branches", (3, 1), "1f1b", "never"),
    ("constants", (1, 2), "interleaved", "always"),
)
RUNS = (((2, 1), "zb-h1", True), ((2, 2), "gpipe", False), ((1, 3), "1f1b", True))


def test_steps_are_the_models(pool: Pool) -> None:
    assert all(pool.run(replica_groups.is_the_model, "numbers", (1, 3), "zb-h1", "except_last"))


@pytest.mark.slow
def test_the_same_as_in_one_process(pool: Pool, tmp_path: Path) -> None:
    """A weight that two stages share, random numbers, statistics, a batch that leaves a replica without work."""
    pool.run(replica_groups.is_as_in_one_process, tmp_path / "saved", (1, 2), "1f1b", False, ranks=(0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", LAZY])
def test_the_optimizers_state_is_sharded(pool: Pool, tmp_path: Path, mode: str) -> None:
    first, second = 0.4, 0.6  # torch shares out whole tensors, so halves are not exact
    shares = pool.run(replica_groups.optimizer_is_sharded, mode, tmp_path / "saved")
    assert all(first < share < second for share in shares)
    assert [shares[0] + shares[1], shares[2] + shares[3]] == pytest.approx([1, 1])


@pytest.mark.slow
def test_python_numbers(pool: Pool) -> None:
    pool.run(replica_groups.numbers_are_the_models, (1, 1), ranks=(0, 1))
    pool.run(replica_groups.numbers_are_the_models, (1, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts", "schedule", "checkpoint"), STEPS)
def test_more_steps(pool: Pool, name: str, counts: tuple[int, ...], schedule: str, checkpoint: str) -> None:
    ranks = tuple(range(sum(counts)))
    assert all(pool.run(replica_groups.is_the_model, name, counts, schedule, checkpoint, ranks=ranks))


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "schedule", "deferred"), RUNS)
def test_more_of_one_process(
    pool: Pool, tmp_path: Path, counts: tuple[int, ...], schedule: str, deferred: bool
) -> None:
    ranks = tuple(range(sum(counts)))
    pool.run(replica_groups.is_as_in_one_process, tmp_path / "saved", counts, schedule, deferred, ranks=ranks)


@pytest.mark.slow
def test_around_steps(pool: Pool, tmp_path: Path) -> None:
    """Of a model whose batch norm is in a stage without replicas: elsewhere its statistics would be those of slices."""
    pool.run(replica_groups.kept, tmp_path / "saved", (2, 1, 1), (2, 1, 1))
