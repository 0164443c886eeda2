"""What users do with a pipe over ranks, beside steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.whole.ranks import cases, replica_groups
from tests.whole.ranks.pool import Pool


def test_training(pool: Pool) -> None:
    """Gradient accumulation, an optimizer, evaluation, and a GradScaler are those of the plain model; each rank may
    drop what belongs to others, and loads what is its own."""
    pool.run(cases.train)


@pytest.mark.slow
def test_meshes_and_plans(pool: Pool) -> None:
    """The group may be a mesh; the plan may be made before; a later kind of call may need fewer stages."""
    pool.run(cases.mesh)


@pytest.mark.slow
def test_a_forked_child(pool: Pool) -> None:
    """It may not use the connections of the rank that it came from."""
    pool.run(cases.fork)


def test_a_pipe_that_is_dropped(pool: Pool) -> None:
    """It is gone at once."""
    pool.run(cases.drop)


def test_a_scaler_that_is_wrong_on_one_rank(pool: Pool, tmp_path: Path) -> None:
    """All ranks hear of it at once, whichever it is."""
    pool.run(replica_groups.refuse_scalers, tmp_path / "saved", ranks=(0, 1))


def test_calls_that_only_some_ranks_make(pool: Pool, tmp_path: Path) -> None:
    """As with `if rank == 0: save_checkpoint(...)`."""
    pool.run(cases.call_apart, tmp_path / "saved", ranks=(0, 1, 2))


@pytest.mark.slow
def test_a_target_on_the_last_rank_alone(pool: Pool) -> None:
    pool.run(cases.target_on_the_last, ranks=(0, 1))


@pytest.mark.slow
def test_ranks_that_are_given_different_batches(pool: Pool) -> None:
    pool.run(cases.different_batches, ranks=(0, 1, 2))


@pytest.mark.slow
def test_time_to_compile_is_no_silence(pool: Pool) -> None:
    pool.run(cases.compile_slowly, ranks=(0, 1))
