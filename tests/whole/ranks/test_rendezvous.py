"""Steps over a process group with NCCL's rules: nothing is buffered, calls of a communicator run in order. Steps are
the model's, and each fault ends on all ranks, soon, with its cause."""

from __future__ import annotations

import time

import pytest

from tests.helpers.rendezvous_group import EAGER, LAZY
from tests.whole.ranks import rendezvous
from tests.whole.ranks.pool import Pool, RankFailed
from tests.whole.test_steps import CHECKPOINTS, NAMES

STEPS = (
    ("skip ladder", "gpipe", 2, None, LAZY),
    ("numbers", "zb-h1", 3, None, EAGER),
    ("tied transformer", "1f1b", 3, (2, 1), LAZY),
)
CROSSING = ("skip ladder", "tied transformer", "batch norm", "masked", "numbers")  # what moves between stages differs


def over(count: int) -> tuple[int, ...]:
    return tuple(range(count))


@pytest.mark.parametrize(("name", "schedule", "count", "replicas", "mode"), STEPS)
def test_steps(pool: Pool, name: str, schedule: str, count: int, replicas: tuple[int, ...] | None, mode: str) -> None:
    pool.run(rendezvous.is_the_model, mode, name, schedule, "except_last", replicas, ranks=over(count))


@pytest.mark.parametrize("mode", [LAZY, EAGER])
def test_the_group_keeps_the_rules(mode: str) -> None:
    ranks = Pool(2)
    try:
        ranks.run(rendezvous.keeps_the_rules, mode, ranks=over(2))
        ranks.run(rendezvous.computes_collectives, mode, ranks=over(2))
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("index", "schedule"), list(enumerate(NAMES)), ids=NAMES)
def test_all_schedules(pool: Pool, index: int, schedule: str, count: int) -> None:
    at = index + count
    name, mode = CROSSING[at % len(CROSSING)], (LAZY, EAGER)[at % 2]
    pool.run(rendezvous.is_the_model, mode, name, schedule, CHECKPOINTS[at % len(CHECKPOINTS)], None, ranks=over(count))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 2), (2, 2), (1, 3), (2, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_replicas(pool: Pool, schedule: str, replicas: tuple[int, ...]) -> None:
    pool.run(rendezvous.is_the_model, EAGER, "tied transformer", schedule, "never", replicas, ranks=over(sum(replicas)))


def test_what_fails_on_one_rank_is_told_to_all(pool: Pool) -> None:
    pool.run(rendezvous.tell_of_faults, LAZY, ranks=over(3))
    pool.run(rendezvous.tell_of_faults, None, ranks=over(2))


@pytest.mark.slow
def test_an_error_in_any_action(pool: Pool) -> None:
    pool.run(rendezvous.fail_in_each_action, EAGER, ranks=over(4))


def test_a_device_that_fails_for_good() -> None:
    ranks = Pool(3)
    try:
        ranks.run(rendezvous.give_up, LAZY, ranks=over(3))
    finally:
        ranks.close()


@pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_lost_rank_frees_all_others(end: str) -> None:
    """Also those that wait for one that waits itself."""
    ranks = Pool(3)
    try:
        ranks.start(rendezvous.lose_one, EAGER, end, ranks=over(3))
        began = time.monotonic()
        for rank in (0, 2):
            with pytest.raises((RankFailed, EOFError), match="rank 1 " + ("is gone" if end == "kill" else "did not")):
                ranks.results((rank,), 60)
        assert time.monotonic() - began < 60
    finally:
        ranks.close()
