"""Idle time and bytes, by hand."""

from __future__ import annotations

import pytest

from benchmarks.schedule_measures import Kept, bubble, gaps, idle, peak_bytes, peak_live, rolling_bubble
from fxpipe.ir.schedule.schedule import Costs, Schedule, parse

ONE = Costs(1, 1, 1, 1)

#                0   1   2   3   4   5
SPLIT = parse("""F0  F1   .  I0  W0  I1  W1
                  .  F0  I0  F1  I1  W0  W1""", name="split")  # fmt: skip


def test_idle_and_gaps() -> None:
    assert idle(SPLIT, ONE) == (1, 1)  # device 0 waits for I0 of stage 1; device 1 for F0 of stage 0
    assert gaps(SPLIT, ONE) == (1, 0)
    assert bubble(SPLIT, 1, 2, 1, 1) == pytest.approx(2 / 14)
    assert rolling_bubble(SPLIT, ONE) == pytest.approx(1 - 12 / 14)


def test_the_whole_step() -> None:
    early = parse("F0 F1 . B0 F2 B1 . B2 \n . F0 B0 F1 B1 F2 B2")
    turn = parse("0F0 0F1 . 3F0 3B0 3F1 3B1 0B0 . 0B1 \n . 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    assert bubble(early) == pytest.approx(1 / 4)
    assert bubble(early, forward=3, backward=1) == pytest.approx(1 / 4)
    assert [peak_live(schedule) for schedule in (early, turn, SPLIT)] == [(2, 1), (3, 4), (2, 2)]
    assert peak_live(parse("F0 F1 F2")) == (0,)
    nothing = Schedule("nothing", ((), ()))
    assert (bubble(nothing), peak_live(nothing)) == (0.0, (0, 0))


def test_whole_and_rolling_differ_by_the_way_to_the_last_device() -> None:
    forwards = parse("F0 F1 \n . F0 F1")
    assert (idle(forwards), gaps(forwards)) == ((1, 1), (0, 0))
    assert (bubble(forwards), rolling_bubble(forwards)) == (pytest.approx(1 / 3), 0)


def test_costs() -> None:
    early = parse("F0 . . B0 \n . F0 B0")
    assert gaps(early, Costs(forward=2, backward=3)) == (5, 0)
    assert idle(early, Costs(forward=2, backward=3)) == (5, 5)


def test_bytes_of_each_stage() -> None:
    kept = [Kept(whole=10, half=3), Kept(whole=100, half=60)]
    assert peak_bytes(SPLIT, kept) == (20, 160)
    #                     10  110  120   80   73  173  113   13   10    0  bytes after each action
    two_stages = parse("0F0  1F0  0F1  1I0  0I0  1F1  1W0  1B1  0W0  0B1")
    assert peak_bytes(two_stages, kept) == (173,)
    assert peak_bytes(parse("F0 F1"), [Kept(10, 3)]) == (0,)


def test_nothing() -> None:
    nothing = Schedule("nothing", ((), ()))
    assert (idle(nothing), gaps(nothing), rolling_bubble(nothing), peak_bytes(nothing, ())) == (
        (0, 0),
        (0, 0),
        0,
        (0, 0),
    )
