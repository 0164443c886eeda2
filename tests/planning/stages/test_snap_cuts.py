"""Cuts move to better places, but never by more than they may."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fxpipe.ir.graph.graph import Op, Origin
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.planning.stages.balance import StageCosts, balance, loads
from fxpipe.planning.stages.snap_cuts import depth, settle


def stage(work: list[int], room: int = 10**9) -> StageCosts:
    none = [0] * (len(work) + 1)
    return StageCosts(list(accumulate(work, initial=0)), none, none, none, none, room)


def op(module: str, line: int) -> Op:
    return Op("x", "relu", (), {}, TensorType("f32", (), "cpu"), Origin("net.py", line, "x = f(x)", module))


def test_depth_counts_shared_modules_and_lines() -> None:
    assert depth(op("encoder.1.fc", 3), op("decoder.0", 9)) == 0
    assert depth(op("encoder.1.fc", 3), op("encoder.2.fc", 3)) == 2  # one module, and the same line
    assert depth(op("encoder.1.fc", 3), op("encoder.1.norm", 4)) == 2


def test_a_cut_moves_where_less_crosses() -> None:
    stages, allowed = [stage([50, 50, 1, 50, 50])] * 2, [[1, 2, 3, 4]]
    ugly = [(0, 0), (9, 0), (9, 0), (1, 0), (9, 0), (0, 0)]
    assert settle(stages, allowed, (0, 2, 5), ugly, slack=0.02) == (0, 3, 5)
    assert settle(stages, allowed, (0, 2, 5), ugly, slack=0.0) == (0, 3, 5)  # as fast
    far = [*ugly[:4], (0, 0), (0, 0)]
    assert settle(stages, allowed, (0, 2, 5), far, slack=0.02) == (0, 3, 5)  # 4 would be half as slow again


@given(
    st.lists(st.integers(1, 100), min_size=4, max_size=30),
    st.integers(2, 4),
    st.floats(0, 0.5),
    st.randoms(use_true_random=False),
)
def test_no_stage_is_slower_than_allowed(work: list[int], k: int, slack: float, random: Random) -> None:
    stages, allowed = [stage(work)] * k, [list(range(1, len(work)))] * (k - 1)
    best = balance(stages, allowed)
    assert best is not None
    ugly = [(random.randrange(10), 0) for _ in range(len(work) + 1)]
    settled = settle(stages, allowed, best, ugly, slack)
    assert max(loads(stages, settled)) <= max(loads(stages, best)) * (1 + slack)
    assert all(a < b for a, b in pairwise(settled))
    assert sum(ugly[c][0] for c in settled) <= sum(ugly[c][0] for c in best)
