"""Over ranks each tensor has one home, whatever is called, in whatever order; and ranks that leave are missed soon."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import one_home, several_kinds
from tests.whole.ranks.pool import Pool

PAIR, THREE, ALL = (0, 1), (0, 1, 2), (0, 1, 2, 3)


def test_nobody_sees_a_stale_tensor(pool: Pool) -> None:
    pool.run(one_home.nobody_sees_a_stale_tensor, ranks=PAIR)


def test_the_whole_model_on_the_ranks_that_ask(pool: Pool) -> None:
    pool.run(one_home.gathered, ranks=PAIR)


@pytest.mark.slow
def test_what_libraries_call(pool: Pool) -> None:
    pool.run(one_home.what_libraries_call, ranks=PAIR)


@pytest.mark.slow
def test_the_models_own_methods(pool: Pool) -> None:
    pool.run(one_home.the_models_own_methods, ranks=PAIR)


LEAVES = mostly_slow(product([0, 1], ["at once", "later", "never"]), (1, "never").__eq__)


@pytest.mark.parametrize(("who", "closes"), LEAVES)
def test_a_rank_that_leaves(pool: Pool, who: int, closes: str) -> None:
    found = pool.run(one_home.one_leaves, who, closes, ranks=PAIR)
    assert found[who] == ["ValueError: no more data", "all went well"] * 2
    left = f"RankError: rank {who} has closed this pipe"
    others = found[1 - who]
    assert [line.startswith(left) for line in others] == [True, False] * 2
    assert others[1::2] == ["all went well"] * 2
    if closes == "at once":
        assert others[0] == f"{left}: ValueError: no more data"


@pytest.mark.slow
def test_owners_that_compute_nothing_in_a_later_call(pool: Pool) -> None:
    """In evaluation an encoder layer is one op, on one of the four devices that share it in training."""
    options = {"chunks": 2, "schedule": "1f1b", "backward": "autograd", "checkpoint": "never"}
    turns = (("step", 0, 16), ("evaluate", 0, 16), ("step", 0, 32))
    programs = ((("unit", (0,)), ("unit", (1,))),)
    case = several_kinds.Case(0, ("norm", "attends"), programs, (), options, "tensor parallel", turns)
    assert not any(pool.run(several_kinds.run, case, ranks=ALL))


SAMPLE = [(PAIR, 0, 4), (PAIR, 4, 4), (THREE, 0, 4), (ALL, 0, 2)]
MORE = [(PAIR, 8, 16), (THREE, 4, 4), (ALL, 8, 4)]


def play(pool: Pool, ranks: tuple[int, ...], first: int, count: int) -> None:
    for seed in range(first, first + count):
        found = pool.run(several_kinds.run, case := several_kinds.drawn(seed, len(ranks)), ranks=ranks)
        assert not any(found), (case, found)


@pytest.mark.parametrize(("ranks", "first", "count"), mostly_slow(SAMPLE, (PAIR, 0, 4).__eq__))
def test_several_kinds_of_calls(pool: Pool, ranks: tuple[int, ...], first: int, count: int) -> None:
    play(pool, ranks, first, count)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "first", "count"), MORE)
def test_more_kinds_of_calls(pool: Pool, ranks: tuple[int, ...], first: int, count: int) -> None:
    play(pool, ranks, first, count)
