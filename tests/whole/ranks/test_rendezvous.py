"""Steps over a process group with NCCL's rules: nothing is buffered, calls of a communicator run in order. Steps are
the model's, and each fault ends on all ranks, soon, with its cause."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.rendezvous_group import EAGER, LAZY
from tests.whole.ranks import rendezvous
from tests.whole.ranks.pool import Pool, RankFailed
from tests.whole.test_steps import CHECKPOINTS, NAMES

STEPS = (
    ("skip ladder", "gpipe", 2, None, LAZY),
    ("numbers", "zb-h1", 3, None, EAGER),
    ("tied transformer", "1f1b", 3, (2, 1), LAZY),
)
MODES = (LAZY, EAGER)
REPLICAS = ((1, 2), (2, 2), (1, 3), (2, 1))
CROSSING = ("skip ladder", "tied transformer", "batch norm", "masked", "numbers")  # what moves between stages differs


def over(count: int) -> tuple[int, ...]:
    return tuple(range(count))


@pytest.mark.parametrize(("name", "schedule", "count", "replicas", "mode"), mostly_slow(STEPS, STEPS[0].__eq__))
def test_steps(pool: Pool, name: str, schedule: str, count: int, replicas: tuple[int, ...] | None, mode: str) -> None:
    pool.run(rendezvous.is_the_model, mode, name, schedule, "except_last", replicas, ranks=over(count))


@pytest.mark.parametrize("mode", MODES)
def test_the_group_keeps_the_rules(mode: str) -> None:
    ranks = Pool(2)
    try:
        ranks.run(rendezvous.keeps_the_rules, mode, ranks=over(2))
        ranks.run(rendezvous.computes_collectives, mode, ranks=over(2))
    finally:
        ranks.close()


@pytest.mark.parametrize("count", slow_in_turn([3, 2, 4], 3))
@pytest.mark.parametrize(("index", "schedule"), list(enumerate(NAMES)), ids=NAMES)
def test_all_schedules(pool: Pool, index: int, schedule: str, count: int) -> None:
    at = index + count
    name, mode = CROSSING[at % len(CROSSING)], MODES[at % 2]
    pool.run(rendezvous.is_the_model, mode, name, schedule, CHECKPOINTS[at % len(CHECKPOINTS)], None, ranks=over(count))


@pytest.mark.parametrize("mode", slow_in_turn(MODES, 2))
@pytest.mark.parametrize(("index", "schedule"), list(enumerate(NAMES)), ids=NAMES)
def test_replicas(pool: Pool, index: int, schedule: str, mode: str) -> None:
    replicas = REPLICAS[(index + MODES.index(mode)) % len(REPLICAS)]
    pool.run(rendezvous.is_the_model, mode, "tied transformer", schedule, "never", replicas, ranks=over(sum(replicas)))


# Faults: each is known on all ranks, with its cause, in less than ten seconds (`SOON`) --------------------------------


@pytest.mark.parametrize("mode", mostly_slow([LAZY, None, EAGER], [LAZY].__contains__))
def test_what_fails_on_one_rank_is_told_to_all(pool: Pool, mode: str | None) -> None:
    """No memory for what is sent or received, and a device that fails once."""
    pool.run(rendezvous.tell_of_faults, mode, ranks=over(3 if mode else 2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_any_action(pool: Pool, mode: str) -> None:
    pool.run(rendezvous.fail_in_each_action, mode, ranks=over(4))


@pytest.mark.parametrize("mode", mostly_slow(MODES, lambda mode: mode == LAZY))
def test_a_device_that_fails_for_good(mode: str) -> None:
    ranks = Pool(3)
    try:
        ranks.run(rendezvous.give_up, mode, ranks=over(3))
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("end", "mode"), mostly_slow(product(("kill", "stop"), MODES), lambda one: one == ("kill", EAGER))
)
def test_a_lost_rank_frees_all_others(end: str, mode: str) -> None:
    """One that is killed, or stands still; also those that wait for one that waits itself."""
    ranks = Pool(3)
    try:
        ranks.start(rendezvous.lose_one, mode, end, ranks=over(3))
        for rank in (0, 2):
            with pytest.raises((RankFailed, EOFError), match="rank 1 " + ("is gone" if end == "kill" else "did not")):
                ranks.results((rank,), 60)
    finally:
        ranks.close()
