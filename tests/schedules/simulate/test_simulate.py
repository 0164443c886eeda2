"""The simulator against pictures by hand, the papers' bubble, and a slow evaluator that knows nothing of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_measures import bubble
from fxpipe.ir.program.kept_bytes import FROM_OUTSIDE, WHOLE_INPUT, KeptBytes
from fxpipe.ir.schedule.schedule import Action, Schedule, parse
from fxpipe.ir.timeline import Timeline, check, show
from fxpipe.schedules.one_f_one_b import early, forward_only, gpipe, late, one_f_one_b
from fxpipe.schedules.simulate.simulate import Hop, StageCost, recomputes, simulate

# The published table of GPipe's bubble, (K - 1) / (T + K - 1) for K stages and T micro-batches.
BUBBLES = {
    (2, 4): 0.2000, (2, 32): 0.0303,
    (4, 4): 0.4286, (4, 16): 0.1579, (4, 32): 0.0857,
    (8, 4): 0.6364, (8, 8): 0.4667, (8, 16): 0.3043, (8, 32): 0.1795,
}  # fmt: skip


@pytest.mark.parametrize(("stages", "chunks"), BUBBLES)
def test_bubble_of_gpipe(stages: int, chunks: int) -> None:
    timeline = simulate(gpipe(stages, chunks), [StageCost(0.010, 0.020)] * stages)
    assert round(timeline.bubble, 4) == BUBBLES[stages, chunks]
    assert timeline.makespan == pytest.approx((chunks + stages - 1) * 0.030)


def at(timeline: Timeline, where: str) -> list[tuple[str, float, float]]:
    return [(f"{span.kind}{span.micro_batch}", span.start, span.end) for span in timeline.on(where)]


def test_transfers_by_hand() -> None:
    """Forward 1, backward 2, transfer 1 s; transfers overlap with compute, but not with each other.

    s         0  1  2  3  4  5  6  7  8  9 10
    a        F0 F1             B0 B0    B1 B1
    a -> b      T0 T1
    b              F0 B0 B0 F1 B1 B1
    b -> a                  T0       T1
    """
    schedule = parse("F0 F1 . . . B0 B1 \n . F0 B0 . F1 B1", name="early")
    timeline = simulate(schedule, [StageCost(1, 2)] * 2, [Hop(0, 1, 1, 1, "x")], devices=("a", "b"))
    check(timeline)
    assert at(timeline, "a") == [("F0", 0, 1), ("F1", 1, 2), ("B0", 6, 8), ("B1", 9, 11)]
    assert at(timeline, "a -> b") == [("T0", 1, 2), ("T1", 2, 3)]
    assert at(timeline, "b") == [("F0", 2, 3), ("B0", 3, 5), ("F1", 5, 6), ("B1", 6, 8)]
    assert at(timeline, "b -> a") == [("T0", 5, 6), ("T1", 8, 9)]
    assert timeline.links == ("a -> b", "b -> a")
    assert timeline.on("b -> a")[0].label == "gradient of x"


def test_a_slow_link_carries_one_value_at_a_time() -> None:
    timeline = simulate(forward_only(2, 3), [StageCost(1, 0)] * 2, [Hop(0, 1, 4, 0)])
    assert at(timeline, "device 0 -> device 1") == [("T0", 1, 5), ("T1", 5, 9), ("T2", 9, 13)]
    assert timeline.makespan == 14


def test_portals_are_waited_for() -> None:
    """Stage 2 has its input from stage 1 at 2 s and the skip from stage 0 at 11 s."""
    hops = [Hop(0, 1, 0, 0), Hop(1, 2, 0, 0), Hop(0, 2, 10, 5, "skip")]
    timeline = simulate(gpipe(3, 1), [StageCost(1, 1)] * 3, hops)
    assert at(timeline, "device 2") == [("F0", 11, 12), ("B0", 12, 13)]
    assert at(timeline, "device 1")[1] == ("B0", 13, 14)
    assert at(timeline, "device 0")[1] == ("B0", 18, 19)  # its gradient took from 13 to 18


def test_values_without_a_gradient_do_not_come_back() -> None:
    timeline = simulate(gpipe(2, 1), [StageCost(1, 1)] * 2, [Hop(0, 1, 1, 0, "mask")])
    assert timeline.links == ("device 0 -> device 1",)


def test_recompute_does_not_wait_for_the_gradient() -> None:
    """R1 of device 0 runs while device 1 is at B1; R0 can not, because device 0 is at B1 itself.

    s         0  1  2  3  4  5  6  7  8
    device 0 F0 F1 R1    B1 B1 R0 B0 B0
    device 1    F0 F1 B1 B0
    """
    costs = [StageCost(1, 2, saved=100, taken=10, checkpoint="always"), StageCost(1, 1, saved=100, taken=10)]
    timeline = simulate(gpipe(2, 2), costs)
    check(timeline)
    assert at(timeline, "device 0") == [
        ("F0", 0, 1), ("F1", 1, 2), ("R1", 2, 3), ("B1", 4, 6), ("R0", 6, 7), ("B0", 7, 9),
    ]  # fmt: skip
    assert timeline.memory[0] == ((0.0, 10), (1, 20), (2, 120), (6, 110), (9, 0))


def test_memory_laws() -> None:
    """GPipe keeps every micro-batch, early backward K_i of them; recomputation keeps what was taken, and one whole."""
    for chunks in (4, 8, 16):
        kept = simulate(gpipe(4, chunks), [StageCost(1, 2, saved=100, fixed=7)] * 4)
        assert kept.high_water == (chunks * 100 + 7,) * 4
        assert [steps[-1][1] for steps in kept.memory] == [7] * 4  # all activations are free at the end
        soon = simulate(one_f_one_b(4, chunks), [StageCost(1, 2, saved=100)] * 4)
        assert soon.high_water == tuple(100 * min(k, chunks) for k in early(4))
        again = simulate(gpipe(4, chunks), [StageCost(1, 2, saved=100, taken=10, checkpoint="always")] * 4)
        assert again.high_water == (chunks * 10 + 100,) * 4
    assert simulate(forward_only(2, 4), [StageCost(1, 2, saved=100, fixed=7)] * 2).high_water == (7, 7)


def test_late_warmup_hides_transfers() -> None:
    hops = [Hop(s, s + 1, 1, 1) for s in range(3)]
    soon, ahead = (simulate(one_f_one_b(4, 16, policy(4)), [StageCost(1, 2)] * 4, hops) for policy in (early, late))
    assert ahead.makespan < soon.makespan


def test_what_single_actions_took() -> None:
    """Each action takes its own time, and a recomputation its own, too; it does not wait for the gradient."""
    schedule = parse("F0 F1 . B0 B1 \n . F0 B0 F1 B1", name="1f1b")
    forward = {Action("F", 0, 0): 1.0, Action("F", 0, 1): 3.0, Action("F", 1, 1): 1.0}
    backward = {Action("R", 0, 0): 1.5, Action("B", 0, 0): 2.0, Action("B", 1, 1): 5.0}
    costs = [StageCost(2, 4, checkpoint="always"), StageCost(2, 4)]
    timeline = simulate(schedule, costs, took={**forward, **backward})
    ends = {(span.kind, span.stage, span.micro_batch): span.end for span in timeline.spans}
    assert [ends["F", 0, i] for i in (0, 1)] == [1.0, 4.0]
    assert [ends["F", 1, 0], ends["B", 1, 0]] == [3.0, 7.0], "2 and 4 seconds, as the stage costs"
    assert [ends["R", 0, 0], ends["B", 0, 0]] == [5.5, 9.0]
    assert [ends["F", 1, 1], ends["B", 1, 1]] == [8.0, 13.0]
    assert [ends["R", 0, 1], ends["B", 0, 1]] == [11.0, 17.0]


def test_several_stages_on_a_device_and_split_backward() -> None:
    """Stages 0 and 3 on one device: what goes between 2 and 3 moves, between stages of one device nothing does."""
    turn = parse("0F0 3F0 3I0 3W0 0B0 \n 1F0 2F0 2B0 1I0 1W0", name="turn")
    hops = [Hop(0, 1, 1, 1), Hop(1, 2, 9, 9), Hop(2, 3, 1, 1)]
    took = {action: 1.0 if action.kind == "I" else 3.0 for action in turn.place if action.kind in "IW"}
    timeline = simulate(turn, [StageCost(1, 4, saved=8)] * 4, hops, took=took)
    check(timeline)
    assert at(timeline, "device 0") == [("F0", 0, 1), ("F0", 5, 6), ("I0", 6, 7), ("W0", 7, 10), ("B0", 14, 18)]
    assert at(timeline, "device 1") == [("F0", 2, 3), ("F0", 3, 4), ("B0", 8, 12), ("I0", 12, 13), ("W0", 13, 16)]
    assert timeline.memory[0] == ((0.0, 8), (5, 16), (10, 8), (18, 0))


def test_stages_of_a_device_that_keep_the_same_memory() -> None:
    """Stage 0 makes `y`, stage 1 takes it: one piece, until the last of the two lets go. What a second forward makes is
    new memory, and the mask is that of all micro-batches."""
    mask, x, y, z, dz = (WHOLE_INPUT, "mask"), (FROM_OUTSIDE, "x"), (0, "y"), (1, "z"), (1, "dz")
    first = KeptBytes({x: 1, y: 10}, {x: 1}, {x: 1})
    second = KeptBytes({mask: 1000, y: 10, z: 100}, {mask: 1000, y: 10}, {dz: 5, y: 10})
    row = parse("0F0 1F0 1I0 0B0 1W0", name="turn")
    costs = [StageCost(1, 2, kept=kept) for kept in (first, second)]
    assert simulate(row, costs).memory[0] == ((0.0, 11), (1, 1111), (3, 16), (5, 15), (6, 0))
    again = [replace(cost, checkpoint="always") for cost in costs]
    assert simulate(row, again).memory[0] == (
        (0, 1),
        (1, 1011),
        (2, 1111),
        (3, 1111),
        (4, 26),
        (5, 26),
        (7, 15),
        (8, 0),
    )
    twice = parse("0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0", name="two")
    assert simulate(twice, costs).high_water == (2 * 111 + 1000,)


def test_idle_time_is_shown() -> None:
    assert show(simulate(gpipe(2, 2), [StageCost(0.001, 0.002)] * 2)).splitlines()[0] == "gpipe: 9 ms, bubble 33.3%"


@pytest.mark.parametrize(
    ("costs", "devices", "message"),
    [
        ([StageCost(1, 1)] * 3, (), "costs of 3 stages for a schedule of 2"),
        ([StageCost(1, 1)] * 2, ("a", "a"), "a device has one row"),
        ([StageCost(1, 1)] * 2, ("a",), "1 names for the 2 devices of the schedule"),
    ],
)
def test_refused(costs: list[StageCost], devices: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(gpipe(2, 2), costs, devices=devices)


def test_deadlock_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for B0 of stage 1 on device 1, which never comes"):
        simulate(parse("F0 B0 F1 B1 \n F0 F1 B0 B1"), [StageCost(1, 1)] * 2)


# A second opinion ------------------------------------------------------------------------------------------------


def ends(schedule: Schedule, costs: list[StageCost], there: list[float], back: list[float]) -> dict[Action, float]:
    """When each action ends, by recursion on the definition, for one stage per device and hops between neighbours."""
    n = len(costs)

    def before(action: Action) -> Action | None:
        row = schedule.devices[action.stage]
        position = row.index(action)
        return row[position - 1] if position else None

    @cache
    def end(action: Action) -> float:
        kind, s, i = action
        ahead = before(action)
        free = end(ahead) if ahead else 0.0
        if kind == "F":
            return max(free, arrives("F", s - 1, i) if s else 0.0) + costs[s].forward
        again = costs[s].forward if recomputes(schedule, costs[s], s, i) else 0.0
        return max(free + again, arrives("B", s + 1, i) if s + 1 < n else 0.0) + costs[s].backward

    @cache
    def arrives(kind: str, s: int, i: int) -> float:
        """When what stage s sends of micro-batch i is there: after all that it sent the same way before."""
        row = [action for action in schedule.devices[s] if action.kind == kind]
        position = row.index(Action(kind, s, i))
        link_free = arrives(kind, s, row[position - 1].micro_batch) if position else 0.0
        return max(link_free, end(Action(kind, s, i))) + (there[s] if kind == "F" else back[s - 1])

    return {action: end(action) for action in schedule.place}


SECONDS = st.integers(1, 9).map(float)


@given(stages=st.integers(1, 6), chunks=st.integers(1, 8), data=st.data())
@settings(max_examples=80, deadline=None)
def test_equals_the_slow_evaluator(stages: int, chunks: int, data: st.DataObject) -> None:
    schedule = data.draw(
        st.sampled_from([gpipe(stages, chunks), *(one_f_one_b(stages, chunks, p(stages)) for p in (early, late))])
    )
    modes = st.sampled_from(["never", "except_last", "always"])
    cost = st.builds(StageCost, SECONDS, SECONDS, checkpoint=modes, saved=st.integers(0, 9), taken=st.integers(0, 9))
    costs = data.draw(st.lists(cost, min_size=stages, max_size=stages))
    there, back = (data.draw(st.lists(SECONDS, min_size=stages, max_size=stages)) for _ in "ab")
    hops = [Hop(s, s + 1, there[s], back[s]) for s in range(stages - 1)]
    timeline = simulate(schedule, costs, hops)
    check(timeline)
    ours = {Action(s.kind, s.stage, s.micro_batch): s.end for s in timeline.spans if s.kind in "FB"}
    assert ours == ends(schedule, costs, there, back)
    for steps in timeline.memory:
        assert steps[-1][1] == 0
        assert min(held for _, held in steps) >= 0
    for link in timeline.links:
        assert all(a.end <= b.start for a, b in pairwise(timeline.on(link)))


@given(stages=st.integers(1, 16), chunks=st.integers(1, 64))
@settings(max_examples=30, deadline=None)
def test_without_transfers_the_bubble_is_the_schedules(stages: int, chunks: int) -> None:
    schedule = one_f_one_b(stages, chunks)
    assert simulate(schedule, [StageCost(3, 5)] * stages).bubble == pytest.approx(bubble(schedule, 3, 5))


def test_nothing_is_recomputed_where_backward_follows_at_once() -> None:
    schedule = parse("F0 F1 B0 B1 \n . F0 B0 F1 B1", name="early")
    cost = StageCost(1, 2, saved=100, taken=10, checkpoint="always", keeps_at_once=True)
    timeline = simulate(schedule, [cost, cost])
    again = [(span.where, span.micro_batch) for span in timeline.spans if span.kind == "R"]
    assert again == [("device 0", 0), ("device 0", 1)]
    assert timeline.high_water == (120, 100)
