"""Several stages per device, dealt in turn: the bubble is smaller by their number, for any number of micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_measures import bubble, idle, peak_live
from fxpipe.ir.schedule.schedule import dump_csv, load_csv, parse
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.schedules.interleaved import groups, interleaved, interleaved_late, looped_bfs
from fxpipe.schedules.one_f_one_b import early, late, one_f_one_b

SIZES = {"n": st.integers(1, 8), "loops": st.integers(1, 4), "chunks": st.integers(1, 64)}


def test_breadth_first_by_hand() -> None:
    by_hand = parse("""
        0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
        1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """)
    assert looped_bfs(4, 2, devices=2).devices == by_hand.devices


def test_one_loop_is_the_straight_schedule() -> None:
    for n in range(1, 6):
        for chunks in range(1, 9):
            assert interleaved(n, chunks, devices=n).devices == one_f_one_b(n, chunks).devices
            assert interleaved_late(n, chunks, devices=n).devices == one_f_one_b(n, chunks, late(n)).devices


def test_groups() -> None:
    assert [list(map(len, groups(chunks, 4))) for chunks in (1, 4, 7, 8, 11, 13)] == [
        [1], [4], [7], [4, 4], [6, 5], [5, 4, 4],
    ]  # fmt: skip


@given(**SIZES)
@settings(max_examples=20, deadline=None)
def test_the_published_bubble_for_any_number_of_micro_batches(n: int, loops: int, chunks: int) -> None:
    """Megatron's (n - 1) / m of 3 per small stage, over v: here not only for multiples of n."""
    for make in (interleaved, interleaved_late, looped_bfs):
        schedule = make(loops * n, chunks, n)
        check(schedule)
        if chunks >= n:
            assert idle(schedule) == (3 * (n - 1),) * n
            assert bubble(schedule) == pytest.approx((n - 1) / (loops * chunks + n - 1))


@given(**SIZES)
@settings(max_examples=20, deadline=None)
def test_memory(n: int, loops: int, chunks: int) -> None:
    """It grows with the group, which has fewer than 2n micro-batches, and not with their number."""
    largest = max(map(len, groups(chunks, n)))
    for make, last in ((interleaved, early(n)), (interleaved_late, late(n))):
        for live, ahead in zip(peak_live(make(loops * n, chunks, n)), last, strict=True):
            assert live <= (loops - 1) * largest + ahead
    assert largest < 2 * n or largest == chunks
    assert peak_live(looped_bfs(loops * n, chunks, n)) == (loops * chunks,) * n


@given(stages=st.integers(1, 16), n=st.integers(1, 8), chunks=st.integers(1, 24))
@settings(max_examples=20, deadline=None)
def test_the_last_loop_may_be_short(stages: int, n: int, chunks: int) -> None:
    n = min(stages, n)
    for make in (interleaved, interleaved_late, looped_bfs):
        schedule = make(stages, chunks, n)
        check(schedule)
        assert parse(str(schedule)) == schedule
        assert load_csv(dump_csv(schedule), schedule.name) == schedule


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 17))
def test_every_size(n: int) -> None:
    for loops in (1, 3):  # two are the placement's, and swept with all other names
        for chunks in (*range(1, 21), 31, 32, 33, 64):
            for make in (interleaved, interleaved_late, looped_bfs):
                check(make(loops * n, chunks, n))


def test_refused() -> None:
    with pytest.raises(ValueError, match="warmup has 1 numbers; 2 devices need 2"):
        interleaved(4, 4, 2, warmup=[3])
    for make in (interleaved, looped_bfs):
        with pytest.raises(ValueError, match="devices is 0"):
            make(4, 4, 0)
