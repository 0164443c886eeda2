"""GPipe and one-forward-one-backward: pictures by hand, then every size against the laws of the papers."""

from __future__ import annotations

from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_measures import bubble, peak_live
from fxpipe.ir.schedule.schedule import Schedule, clocks, dump_csv, load_csv, parse, show
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.ir.schedule.sub_schedule import share
from fxpipe.schedules.one_f_one_b import early, forward_only, gpipe, late, one_f_one_b


def text(picture: str) -> str:
    return dedent(picture).strip()


def test_gpipe_picture() -> None:
    assert show(gpipe(2, 3)) == text("""
        gpipe: 2 stages, 3 micro-batches
        clock      0   1   2   3   4   5   6   7
        device 0  F0  F1  F2          B2  B1  B0
        device 1      F0  F1  F2  B2  B1  B0
    """)


def test_warmup_by_hand() -> None:
    assert show(one_f_one_b(2, 4, warmup=(3, 1))) == text("""
        1f1b: 2 stages, 4 micro-batches
        clock      0   1   2   3   4   5   6   7   8   9
        device 0  F0  F1  F2  B0  F3  B1      B2      B3
        device 1      F0  B0  F1  B1  F2  B2  F3  B3
    """)


def test_warmup_of_all_is_gpipe_but_for_the_order_of_backward() -> None:
    all_first = one_f_one_b(3, 4, warmup=(4, 4, 4))
    for ours, theirs in zip(all_first.devices, gpipe(3, 4).devices, strict=True):
        assert ours[:4] == theirs[:4]
        assert ours[4:] == theirs[:3:-1]


#            clock  micro-batch, stage
CYCLES = (
    ((0, 0),),
    ((1, 0), (0, 1)),
    ((2, 0), (1, 1), (0, 2)),
    ((3, 0), (2, 1), (1, 2)),
    ((3, 1), (2, 2)),
    ((3, 2),),
)  # fmt: skip


def clock_cycles(m: int, n: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The forward grid column by column: per clock the (micro-batch i, stage j) that run, which have i + j = clock.

    m micro-batches, n stages:

        clock     0   1   2   3
        stage 0  F0  F1  F2
        stage 1      F0  F1  F2

    >>> for tick in clock_cycles(m=3, n=2):
    ...     print(tick)
    ((0, 0),)
    ((1, 0), (0, 1))
    ((2, 0), (1, 1))
    ((2, 1),)
    """
    return tuple(
        tuple((clock - j, j) for j in range(max(0, clock - m + 1), min(clock + 1, n))) for clock in range(m + n - 1)
    )


def test_clock_cycles() -> None:
    assert clock_cycles(m=4, n=3) == CYCLES
    assert clock_cycles(m=1, n=1) == (((0, 0),),)


SIZES = {"stages": st.integers(1, 16), "chunks": st.integers(1, 64)}


@given(**SIZES)
@settings(max_examples=60, deadline=None)
def test_clock_cycles_are_the_forward_grid(stages: int, chunks: int) -> None:
    columns = clocks(forward_only(stages, chunks))
    at = {(i, j): clock for j, column in enumerate(columns) for i, clock in enumerate(column)}
    assert {task: clock for clock, tick in enumerate(clock_cycles(chunks, stages)) for task in tick} == at


def legal(schedule: Schedule) -> None:
    """Complete, ordered, free of deadlock; reads back from both of its texts."""
    check(schedule)
    assert parse(show(schedule)) == schedule
    assert load_csv(dump_csv(schedule), schedule.name) == schedule


@given(**SIZES)
@settings(max_examples=60, deadline=None)
def test_gpipe_for_every_size(stages: int, chunks: int) -> None:
    schedule = gpipe(stages, chunks)
    legal(schedule)
    assert bubble(schedule) == pytest.approx((stages - 1) / (chunks + stages - 1))
    assert peak_live(schedule) == (chunks,) * stages


@given(**SIZES)
@settings(max_examples=60, deadline=None)
def test_early_backward_for_every_size(stages: int, chunks: int) -> None:
    """The bubble of GPipe with memory that does not grow with the micro-batches."""
    schedule = one_f_one_b(stages, chunks)
    legal(schedule)
    assert bubble(schedule) == pytest.approx((stages - 1) / (chunks + stages - 1))
    assert peak_live(schedule) == tuple(min(k, chunks) for k in early(stages))


@given(**SIZES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_falling_warmup_runs(stages: int, chunks: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(1, 70), min_size=stages, max_size=stages))
    warmup = sorted(numbers, reverse=True)
    schedule = one_f_one_b(stages, chunks, warmup)
    check(schedule)
    assert peak_live(schedule) == tuple(min(k, chunks) for k in warmup)


@given(**SIZES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_other_warmup_is_refused(stages: int, chunks: int, data: st.DataObject) -> None:
    """Exactly the warm-ups that would deadlock are: the check finds the others sound."""
    warmup = data.draw(st.lists(st.integers(1, 8), min_size=stages, max_size=stages))
    try:
        check(one_f_one_b(stages, chunks, warmup))
    except ValueError as error:
        assert "wait for ever" in str(error)  # noqa: PT017
        assert any(min(b, chunks) > a for a, b in pairwise(warmup))


@given(**SIZES, limit=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_memory_limit_holds(stages: int, chunks: int, limit: int) -> None:
    for policy in (early, late):
        schedule = one_f_one_b(stages, chunks, policy(stages, limit))
        check(schedule)
        assert max(peak_live(schedule)) <= limit


def test_late_is_ahead_of_early_only() -> None:
    assert (early(3), late(3)) == ((3, 2, 1), (5, 3, 1))
    assert early(1) == late(1) == (1,)


@given(**SIZES, devices=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_stages_may_share_devices(stages: int, chunks: int, devices: int) -> None:
    for schedule in (gpipe(stages, chunks), one_f_one_b(stages, chunks)):
        shared = share(schedule, [f"cpu:{s % devices}" for s in range(stages)])
        legal(shared)
        assert len(shared.devices) == min(stages, devices)


@given(**SIZES)
@settings(max_examples=20, deadline=None)
def test_forward_only(stages: int, chunks: int) -> None:
    schedule = forward_only(stages, chunks)
    legal(schedule)
    assert bubble(schedule) == pytest.approx((stages - 1) / (chunks + stages - 1))
    assert peak_live(schedule) == (0,) * stages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 4), "stages is 0; a schedule needs at least one"),
        (lambda: gpipe(4, 0), "chunks is 0; a schedule needs at least one"),
        (lambda: forward_only(-1, 4), "stages is -1"),
        (lambda: one_f_one_b(3, 4, (2, 1)), "warmup has 2 numbers; 3 stages need 3"),
        (lambda: one_f_one_b(2, 4, (2, 0)), "runs at least one forward before its first backward"),
        (lambda: one_f_one_b(2, 4, (1, 2)), "device 1 would wait for ever for its forward 1"),
    ],
)
def test_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
