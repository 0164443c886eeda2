"""Halves of a backward are joined where that costs nothing, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_measures import peak_live
from fxpipe.ir.schedule.schedule import Action, Schedule, parse
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.schedules.make_schedule import make, placement
from fxpipe.schedules.one_f_one_b import one_f_one_b
from fxpipe.schedules.simulate.merge_backward_halves import SLACK, latest_first, merge_backward_halves
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate

SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def splits(schedule: Schedule) -> int:
    return sum(action.kind == "W" for action in schedule.place)


def test_three_of_sixteen_backwards_are_split_where_two_devices_wait_for_no_more() -> None:
    joined = merge_backward_halves(make("zb-h1", ("a", "b"), 8), [StageCost(1, 2)] * 2)
    assert str(joined).splitlines()[-2:] == [
        "device 0  F0  F1      B0  F2  B1  F3  B2  F4  B3  F5  B4  F6  B5  F7  B6      B7",
        "device 1      F0  I0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6  F7  I7  W7  W0",
    ]


def test_the_bubble_of_zb_h1_stays_a_third_of_that_of_1f1b() -> None:
    costs = [StageCost(1, 2)] * 4
    joined = merge_backward_halves(make("zb-h1", "abcd", 8), costs)
    idle = [simulate(one, costs).idle[0] for one in (one_f_one_b(4, 8), joined)]
    assert idle == [9, 3]


def test_a_half_that_somebody_waits_for_stays_a_half() -> None:
    split = parse("F0 . I0 W0 \n . F0 I0 W0", name="split")
    assert str(merge_backward_halves(split, [StageCost(1, 2)] * 2).devices[1][1]) == "1I0"


def test_what_is_not_split_stays_as_it_is() -> None:
    schedule = one_f_one_b(2, 4)
    assert merge_backward_halves(schedule, [StageCost(1, 2)] * 2) is schedule


def test_the_last_weight_gradient_comes_first() -> None:
    row = parse("F0 I0 F1 I1 W0 W1").devices[0]
    assert [str(action) for action in latest_first(Schedule("one", (row,))).devices[0]][3:] == ["0I1", "0W1", "0W0"]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SPLIT),
    n=st.integers(1, 5),
    chunks=st.integers(1, 12),
    seconds=st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), min_size=10, max_size=10),
    hop=st.floats(0, 0.5),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
)
def test_joined_schedules_are_right_and_no_slower(
    name: str,
    n: int,
    chunks: int,
    seconds: list[tuple[float, float]],
    hop: float,
    checkpoint: str,
) -> None:
    split = make(name, placement(name, [f"cpu:{d}" for d in range(n)]), chunks)
    costs = [StageCost(*seconds[s], checkpoint=checkpoint) for s in range(split.num_stages)]
    hops = [Hop(s, s + 1, hop, hop) for s in range(split.num_stages - 1)]
    joined = merge_backward_halves(split, costs, hops)
    check(joined)
    assert splits(joined) <= splits(split)
    assert peak_live(joined) == peak_live(split)
    assert simulate(joined, costs, hops).makespan <= simulate(split, costs, hops).makespan * (1 + SLACK + 1e-9)


@pytest.mark.parametrize("name", SPLIT)
def test_every_backward_is_there_once(name: str) -> None:
    split = make(name, placement(name, ("a", "b", "c")), 7)
    joined = merge_backward_halves(split, [StageCost(1, 2)] * split.num_stages)
    for s in range(split.num_stages):
        for i in range(7):
            assert (Action("B", s, i) in joined.place) != (Action("W", s, i) in joined.place)
