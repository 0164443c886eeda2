"""The balance: small ones by hand, then every small random line of ops against trying all cuts."""

from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.planning.stages.balance import StageCosts, balance, loads


def stage(work, enter=None, leave=None, bytes=None, hold=None, room=10**9) -> StageCosts:
    """A stage by the cost of each op; transfers and bytes are zero where they are not given."""
    n = len(work)
    none = [0] * (n + 1)
    sums = [list(accumulate(ops or [0] * n, initial=0)) for ops in (work, bytes)]
    return StageCosts(sums[0], enter or none, leave or none, sums[1], hold or none, room)


def anywhere(n: int, k: int) -> list[list[int]]:
    return [list(range(1, n))] * (k - 1)


def test_even_ops():
    assert balance([stage([1] * 9)] * 3, anywhere(9, 3)) == (0, 3, 6, 9)


def test_the_remainder_is_spread():
    cuts = balance([stage([1] * 10)] * 4, anywhere(10, 4))
    assert sorted(loads([stage([1] * 10)] * 4, cuts)) == [2, 2, 3, 3]


def test_a_cut_avoids_what_is_dear_to_move():
    #  ops        5  5  5  5
    #  crosses  0  9  1  9  0
    crosses = [0, 9, 1, 9, 0]
    assert balance([stage([5] * 4, crosses, crosses)] * 2, anywhere(4, 2)) == (0, 2, 4)
    assert balance([stage([4, 7, 5, 6])] * 2, [[1, 3]]) == (0, 3, 4)


def test_memory_moves_the_cut():
    def room(bytes: int) -> StageCosts:
        return stage([1] * 6, bytes=[4, 1, 1, 1, 1, 4], room=bytes)

    assert balance([room(9), room(9)], anywhere(6, 2)) == (0, 3, 6)
    assert balance([room(5), room(9)], anywhere(6, 2)) == (0, 2, 6)
    assert balance([room(5), room(6)], anywhere(6, 2)) is None


def test_a_fast_device_gets_more():
    assert balance([stage([2] * 9), stage([1] * 9)], anywhere(9, 2)) == (0, 3, 9)


def test_one_stage():
    assert balance([stage([3, 4])], []) == (0, 2)


@st.composite
def problems(draw):
    n = draw(st.integers(1, 8))
    k = draw(st.integers(1, min(n, 4)))
    small = st.integers(0, 9)
    costs = st.lists(small, min_size=n, max_size=n)
    cut = st.lists(small, min_size=n + 1, max_size=n + 1)
    stages = [
        stage(draw(costs), draw(cut), draw(cut), draw(costs), draw(cut), draw(st.integers(0, 40))) for _ in range(k)
    ]
    position = st.sets(st.integers(1, max(1, n - 1)), max_size=n) if n > 1 else st.just(set())
    allowed = [sorted(draw(st.one_of(position, st.just(set(range(1, n)))))) for _ in range(k - 1)]
    return stages, allowed


def all_cuts(stages, allowed):
    n = len(stages[0].work) - 1
    for inner in combinations(range(1, n), len(stages) - 1):
        cuts = (0, *inner, n)
        legal = all(cut in fine for cut, fine in zip(inner, allowed, strict=True))
        if legal and all(s.held(i, j) <= s.room for s, i, j in zip(stages, cuts[:-1], cuts[1:], strict=True)):
            yield cuts


@settings(max_examples=400, deadline=None)
@given(problems())
def test_equals_trying_all_cuts(problem):
    stages, allowed = problem
    possible = list(all_cuts(stages, allowed))
    found = balance(stages, allowed)
    if not possible:
        assert found is None
        return
    assert found in possible
    assert max(loads(stages, found)) == min(max(loads(stages, cuts)) for cuts in possible)


@pytest.mark.slow
def test_ten_thousand_ops_in_seconds():
    import random
    import time

    rng = random.Random(0)
    n, k = 10_000, 8
    work = [rng.randrange(10**5, 10**9) for _ in range(n)]
    moves = [rng.randrange(10**8) for _ in range(n + 1)]
    stages = [stage(work, moves, moves, [1] * n, room=n // k + 20)] * k
    started = time.process_time()
    cuts = balance(stages, anywhere(n, k))
    assert max(loads(stages, cuts)) < 1.01 * sum(work) / k
    assert time.process_time() - started < 10
