"""Where the time of a step goes. All timelines are constructed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest

from fxpipe.ir.schedule.schedule import Action, Schedule
from fxpipe.ir.timeline import Timeline
from fxpipe.schedules.diagnosis.time_split import PARTS, TimeSplit, split
from fxpipe.schedules.make_schedule import SCHEDULES, make, placement
from fxpipe.schedules.one_f_one_b import gpipe, one_f_one_b
from fxpipe.schedules.simulate.replica_costs import spread
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate

EVEN = [StageCost(1, 2)] * 4
STEP = one_f_one_b(4, 16)


def took(schedule: Schedule, factors: Mapping[int, float]) -> dict[Action, float]:
    """The seconds of each action, a forward 1 and a backward 2, multiplied by the factor of its stage."""
    return {a: (2 if a.kind == "B" else 1) * factors.get(a.stage, 1.0) for a in schedule.place}


def adds_up(found: TimeSplit) -> None:
    for parts in found.parts.values():
        assert tuple(parts) == PARTS
        assert all(seconds >= -1e-12 for seconds in parts.values())
        assert sum(parts.values()) == pytest.approx(found.seconds, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_parts_of_each_device_add_up_to_the_step(name: str) -> None:
    random = Random(name)
    devices = placement(name, ["a", "b", "c", "d"])
    schedule = make(name, devices, 8)
    costs = [StageCost(random.random(), random.random(), checkpoint="except_last") for _ in range(schedule.num_stages)]
    hops = [Hop(s, s + 1, random.random(), random.random()) for s in range(schedule.num_stages - 1)]
    timeline = simulate(schedule, costs, hops)
    spans = [replace(span, end=span.start + span.seconds * random.random()) for span in timeline.spans]
    found = split(replace(timeline, spans=tuple(spans), call=(-1.0, 100.0)), schedule, timeline)
    adds_up(found)
    assert found.seconds == 101


def test_equal_stages_lose_the_bubble_alone() -> None:
    """GPipe: of M + K - 1 clocks each device computes in M."""
    schedule = gpipe(4, 8)
    found = split(simulate(schedule, EVEN), schedule)
    assert found.seconds == 3 * (8 + 4 - 1)
    for parts in found.parts.values():
        assert (parts["computing"], parts["bubble"]) == (24, 9)
    adds_up(found)


def test_one_micro_batch_is_a_bubble() -> None:
    schedule = gpipe(4, 1)
    found = split(simulate(schedule, EVEN, [Hop(s, s + 1, 0.5, 0.5) for s in range(3)]), schedule)
    assert found.largest == "bubble"
    assert found.mean("bubble") == 9
    assert found.mean("transfers") == 3
    adds_up(found)


def test_a_slow_stage_is_imbalance() -> None:
    """The plan knows of it, so its device is no straggler."""
    slow = simulate(STEP, EVEN, took=took(STEP, {2: 3.0}))
    found = split(slow, STEP, slow)
    assert found.largest == "imbalance"
    assert found.mean("stragglers") == found.mean("transfers") == found.mean("host") == 0
    assert found.parts["device 2"]["imbalance"] == 0
    assert max(found.blamed["computing"], key=found.blamed["computing"].__getitem__) == "device 2"
    adds_up(found)


def test_a_slow_rank_is_a_straggler() -> None:
    """The plan expects the same of all devices."""
    slow = simulate(STEP, EVEN, took=took(STEP, {2: 3.0}))
    found = split(slow, STEP, simulate(STEP, EVEN))
    assert found.largest == "stragglers"
    assert found.slowness == {"device 0": 1, "device 1": 1, "device 2": 3, "device 3": 1}
    assert found.blamed["stragglers"] == {"device 0": 0, "device 1": 0, "device 2": 96, "device 3": 0}
    assert [found.parts[device]["computing"] for device in found.parts] == [48] * 4
    assert found.mean("imbalance") == 0
    adds_up(found)


def test_a_machine_that_is_slower_as_a_whole_has_no_straggler() -> None:
    found = split(simulate(STEP, EVEN, took=took(STEP, dict.fromkeys(range(4), 3.0))), STEP, simulate(STEP, EVEN))
    assert (found.largest, found.mean("stragglers")) == ("bubble", 0)


def test_actions_that_pause_are_stragglers() -> None:
    times = took(STEP, {}) | {Action("B", 1, 7): 40.0}
    found = split(simulate(STEP, EVEN, took=times), STEP, simulate(STEP, EVEN))
    assert found.largest == "stragglers"
    assert found.blamed["stragglers"]["device 1"] == 38
    assert found.slowness["device 1"] == 1
    adds_up(found)


def test_a_cut_where_much_moves_is_transfers() -> None:
    hops = [Hop(0, 1, 0.1, 0.1), Hop(1, 2, 5, 5, "h"), Hop(2, 3, 0.1, 0.1)]
    timeline = simulate(STEP, EVEN, hops)
    found = split(timeline, STEP, timeline)
    assert found.largest == "transfers"
    links = sorted(found.blamed["transfers"], key=found.blamed["transfers"].__getitem__)
    assert set(links[-2:]) == {"device 1 -> device 2", "device 2 -> device 1"}
    assert found.mean("imbalance") == found.mean("stragglers") == found.mean("host") == 0
    adds_up(found)


def test_transfers_that_are_hidden_cost_nothing() -> None:
    """While device 1 computes, the next value arrives: only the first value and the first gradient are waited for."""
    schedule = gpipe(2, 8)
    timeline = simulate(schedule, EVEN[:2], [Hop(0, 1, 0.9, 1.9)])
    found = split(timeline, schedule)
    assert sum(span.seconds for span in timeline.spans if span.kind == "T") == pytest.approx(8 * 2.8)
    assert found.blamed["transfers"] == pytest.approx({"device 0 -> device 1": 0.9, "device 1 -> device 0": 1.9})
    adds_up(found)


def test_recomputation() -> None:
    schedule = gpipe(2, 32)
    found = split(simulate(schedule, [StageCost(1, 2, checkpoint="always")] * 2), schedule)
    assert found.largest == "recomputation"
    assert found.mean("recomputation") == 32
    adds_up(found)


def test_a_slow_host() -> None:
    """Each action takes a third of the time until the next begins."""
    timeline = simulate(STEP, EVEN)
    spans = tuple(replace(span, end=span.start + span.seconds / 3) for span in timeline.spans)
    found = split(replace(timeline, spans=spans), STEP)
    assert found.largest == "host"
    adds_up(found)


def test_a_slow_replica_is_a_straggler() -> None:
    schedule = one_f_one_b(2, 8)
    groups = {"device 0": ("a", "b"), "device 1": ("c",)}
    predicted = spread(simulate(schedule, EVEN[:2]), groups)
    timeline = spread(simulate(schedule, EVEN[:2], took=took(schedule, {0: 4.0})), groups)
    spans = [replace(s, end=s.start + s.seconds / 4) if s.where == "b" else s for s in timeline.spans]
    found = split(replace(timeline, spans=tuple(spans)), schedule, predicted)
    assert found.largest == "stragglers"
    assert max(found.blamed["stragglers"], key=found.blamed["stragglers"].__getitem__) == "a"
    adds_up(found)


def test_nothing() -> None:
    found = split(Timeline("nothing", ("a",), ()), Schedule("nothing", ((),)))
    assert (found.seconds, sum(found.parts["a"].values())) == (0, 0)
