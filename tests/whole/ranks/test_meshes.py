"""Pipes beside each other: rows of a mesh, with data or tensor parallelism between them, are the plain model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.rendezvous_group import EAGER, LAZY
from tests.whole.ranks import meshes
from tests.whole.ranks.pool import Pool, RankFailed
from tests.whole.test_steps import NAMES

SOON = 60  # seconds, as long as a rank may be silent


@pytest.mark.parametrize("mode", mostly_slow([None, EAGER], lambda mode: mode is not None))
def test_steps(pool: Pool, mode: str | None) -> None:
    pool.run(meshes.steps_are_the_models, "dp pp", "fsdp by blocks", "zb-h1", False, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "kinds", "schedule", "attends"),
    [
        ("dp pp", "ddp", "gpipe", False),
        ("pp tp", "tp", "zb-h1", True),
        ("pp tp", "tp", "interleaved", False),
        ("dp pp tp", "tp, fsdp by blocks", "1f1b", False),
    ],
)
def test_more_steps(pool: Pool, names: str, kinds: str, schedule: str, attends: bool) -> None:
    """The last in rows of one rank each: three dimensions take eight ranks, and there are four."""
    pool.run(meshes.steps_are_the_models, names, kinds, schedule, attends)


@pytest.mark.parametrize("mode", slow_in_turn([LAZY, EAGER], 2))
@pytest.mark.parametrize(("names", "kind", "first"), [("pp tp", "tp", 0), ("dp pp", "fsdp", 1), ("dp pp", "ddp", 0)])
def test_all_schedules_under_the_rules_of_nccl(pool: Pool, names: str, kind: str, first: int, mode: str) -> None:
    """Values between stages, and collectives between rows: nothing is buffered, and both may share one queue. Every
    other schedule in each mode."""
    schedules = NAMES[(first + (mode == EAGER)) % 2 :: 2]
    pool.run(meshes.schedules_are_the_model, names, kind, schedules, mode)


@pytest.mark.slow
def test_what_is_refused(pool: Pool) -> None:
    pool.run(meshes.refused)


@pytest.mark.parametrize(
    ("kind", "mode"), mostly_slow([("ddp", None), ("fsdp", None), ("fsdp", LAZY)], lambda one: one[0] == "ddp")
)
def test_an_error_in_one_row(pool: Pool, kind: str, mode: str | None) -> None:
    pool.run(meshes.fail_in_one_row, kind, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, EAGER])
def test_a_rank_is_lost(mode: str | None) -> None:
    """Ranks of its own, for they end."""
    ranks = Pool(4)
    try:
        ranks.start(meshes.lose, "fsdp", mode, ranks=(0, 1, 2, 3))
        began = time.monotonic()
        for rank in (0, 1, 2):
            with pytest.raises((RankFailed, EOFError), match="RankError"):
                ranks.results((rank,), SOON)
        assert time.monotonic() - began < SOON
    finally:
        ranks.close()


@pytest.mark.slow
def test_saved_from_shards(pool: Pool, tmp_path: Path) -> None:
    pool.run(meshes.saved, tmp_path / "saved")


@pytest.mark.slow
def test_the_script(pool: Pool) -> None:
    pool.run(meshes.script)


def test_layers_without_bias(pool: Pool) -> None:
    pool.run(meshes.without_bias)


@pytest.mark.slow
def test_reductions_of_parts(pool: Pool) -> None:
    pool.run(meshes.reductions)


def test_tied_and_cut(pool: Pool) -> None:
    pool.run(meshes.tied_and_cut)
