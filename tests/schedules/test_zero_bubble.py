"""The zero bubble paper's figures, and DeepSeek's for DualPipe-V, for every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_measures import Kept, bubble, gaps, idle, idle_in_pairs, peak_bytes, peak_live, rolling_bubble
from fxpipe.ir.schedule.schedule import Schedule, dump_csv, load_csv, parse
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.schedules.dual_pipe_v import dual_pipe_v
from fxpipe.schedules.one_f_one_b import one_f_one_b
from fxpipe.schedules.zero_bubble import zb_h1, zb_h2, zb_v

Generate = Callable[[int, int], Schedule]
STRAIGHT: tuple[Generate, ...] = (zb_h1, zb_h2)
V: tuple[Generate, ...] = (zb_v, dual_pipe_v)
SIZES = {"n": st.integers(1, 16), "more": st.integers(0, 40)}


def legal(schedule: Schedule, chunks: int) -> None:
    check(schedule)
    assert schedule.chunks == chunks
    assert parse(str(schedule)) == schedule
    assert load_csv(dump_csv(schedule), schedule.name) == schedule


def test_v_by_hand() -> None:
    by_hand = parse("""
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """)
    assert zb_v(4, 3).devices == by_hand.devices


@given(stages=st.integers(1, 16), chunks=st.integers(1, 64))
@settings(max_examples=15, deadline=None)
def test_every_size_is_legal(stages: int, chunks: int) -> None:
    for generate in STRAIGHT:
        legal(generate(stages, chunks), chunks)
    for generate in V:
        legal(generate(stages + stages % 2, chunks), chunks)


@given(**SIZES)
@settings(max_examples=15, deadline=None)
def test_h1_has_a_third_of_the_bubble_and_the_memory(n: int, more: int) -> None:
    chunks = 2 * n - 1 + more
    ours, theirs = zb_h1(n, chunks), one_f_one_b(n, chunks)
    assert max(idle(ours)) == pytest.approx(max(idle(theirs)) / 3) == n - 1
    assert max(gaps(ours)) == pytest.approx(max(gaps(theirs)) / 3) == n - 1
    assert rolling_bubble(ours) == pytest.approx((n - 1) / (3 * chunks + n - 1))
    assert max(peak_live(ours)) == max(peak_live(theirs)) == n


@given(**SIZES)
@settings(max_examples=15, deadline=None)
def test_h2_has_no_bubble_and_twice_the_memory(n: int, more: int) -> None:
    chunks = 2 * n - 1 + more
    schedule = zb_h2(n, chunks)
    assert gaps(schedule) == (0,) * n
    assert rolling_bubble(schedule) == pytest.approx(0)
    assert bubble(schedule) == pytest.approx((n - 1) / (3 * chunks + n - 1))  # whole step: the way to the last device
    assert peak_live(schedule) == (2 * n - 1,) * n


@given(**SIZES)
@settings(max_examples=15, deadline=None)
def test_v_has_no_bubble_and_the_memory_of_1f1b(n: int, more: int) -> None:
    chunks = 2 * n - 1 + more
    schedule = zb_v(2 * n, chunks)
    assert gaps(schedule) == (0,) * n
    assert rolling_bubble(schedule) == pytest.approx(0)
    assert bubble(schedule) == pytest.approx((n - 1) / (6 * chunks + n - 1))
    assert peak_live(schedule) == (2 * n,) * n
    whole, half = Kept(whole=2, half=1), Kept(whole=1, half=1)  # a stage, and one of half the size
    assert max(peak_bytes(schedule, [half] * 2 * n)) == max(peak_bytes(one_f_one_b(n, chunks), [whole] * n))


@given(**SIZES)
@settings(max_examples=15, deadline=None)
def test_dual_pipe_v(n: int, more: int) -> None:
    """Published: 2n + 1 live, and (n - 1) (F&B + B - 3W) idle; and less where a forward hands on at once."""
    chunks = 2 * n + more
    schedule = dual_pipe_v(2 * n, chunks)
    assert peak_live(schedule) == (2 * n + 1,) * n
    assert idle(schedule) == (n - 1,) * n
    for pair in (2.0, 2.5, 3.0):
        assert max(idle_in_pairs(2 * n, chunks, pair)) == pytest.approx((n - 1) * (pair + 2 - 3))


@given(n=st.integers(2, 16), chunks=st.integers(1, 31))
@settings(max_examples=15, deadline=None)
def test_few_micro_batches_take_no_more_memory(n: int, chunks: int) -> None:
    assert max(peak_live(zb_h1(n, chunks))) == min(n, chunks)
    assert max(peak_live(zb_h2(n, chunks))) == min(2 * n - 1, chunks)
    assert max(peak_live(zb_v(2 * n, chunks))) <= min(2 * n, 2 * chunks)
    assert max(peak_live(dual_pipe_v(2 * n, chunks))) <= min(2 * n + 1, 2 * chunks)


@given(n=st.integers(1, 16), chunks=st.integers(1, 32))
@settings(max_examples=15, deadline=None)
def test_few_micro_batches_are_no_slower_than_1f1b(n: int, chunks: int) -> None:
    bar = max(idle(one_f_one_b(n, chunks)))
    for schedule in (zb_h1(n, chunks), zb_h2(n, chunks)):
        assert max(idle(schedule)) <= bar
    for schedule in (zb_v(2 * n, chunks), dual_pipe_v(2 * n, chunks)):
        assert max(idle(schedule)) <= 2 * bar  # a stage is half of one there


@pytest.mark.parametrize("generate", V)
def test_odd_stages_make_no_v(generate: Generate) -> None:
    with pytest.raises(ValueError, match="3 stages do not make a V; it needs two for each device"):
        generate(3, 4)


def test_too_few_for_pairs() -> None:
    with pytest.raises(ValueError, match="3 micro-batches are too few for pairs in 4 stages"):
        idle_in_pairs(4, 3, pair=3)
