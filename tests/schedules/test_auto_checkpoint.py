"""The choice of what is recomputed, against all choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.ir.plan.plan import CHECKPOINT_MODES
from fxpipe.ir.program.kept_bytes import KeptBytes
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.schedules.auto_checkpoint import NothingFits, auto_checkpoint, where_it_saves
from fxpipe.schedules.make_schedule import make, placement
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate

SECONDS = st.integers(1, 9).map(float)
BYTES = st.integers(0, 9)
DEVICES = ("a", "b")


@st.composite
def stages(draw: st.DrawFn, s: int, exact: bool) -> list[StageCost]:
    """What stage s costs with each mode; `exact`: it may keep what the stage before has made."""
    forward, backward = draw(SECONDS), draw(SECONDS)
    taken, own, handed = draw(BYTES), draw(BYTES), draw(BYTES)
    came, made = (s - 1, "y"), (s, "y")
    kept = KeptBytes({came: taken, made: own}, {came: taken}, {(s, "dy"): handed}) if exact else None
    return [
        StageCost(forward, backward, saved=own + taken, taken=taken, kept=kept, checkpoint=mode, keeps_at_once=True)
        for mode in CHECKPOINT_MODES
    ]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, list[list[StageCost]]]:
    """A schedule over two devices, and what each of its stages costs with each mode."""
    name = draw(st.sampled_from(("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")))
    where = placement(name, DEVICES)
    schedule = make(name, where, draw(st.integers(2, 4)))
    exact = draw(st.booleans())
    return schedule, [draw(stages(s, exact)) for s in range(len(where))]


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_none_that_fits_is_faster(data: st.DataObject) -> None:
    schedule, options = data.draw(pipelines())
    hops = [Hop(s, s + 1, data.draw(SECONDS), data.draw(SECONDS)) for s in range(len(options) - 1)]
    timelines = [simulate(schedule, costs, hops, DEVICES) for costs in product(*options)]
    limits = {d: data.draw(st.integers(0, max(t.high_water[at] for t in timelines))) for at, d in enumerate(DEVICES)}
    room = tuple(limits.values())

    def fit(high_water: tuple[int, ...]) -> bool:
        return all(peak <= limit for peak, limit in zip(high_water, room, strict=True))

    fitting = [timeline for timeline in timelines if fit(timeline.high_water)]
    if fitting:
        chosen = simulate(schedule, auto_checkpoint(schedule, options, limits, DEVICES, hops), hops, DEVICES)
        assert fit(chosen.high_water)
        assert chosen.makespan == min(timeline.makespan for timeline in fitting)
    else:
        with pytest.raises(NothingFits, match="bytes at least and has") as caught:
            auto_checkpoint(schedule, options, limits, DEVICES, hops)
        assert tuple(caught.value.least.values()) == tuple(min(t.high_water[at] for t in timelines) for at in (0, 1))


def test_many_stages_of_a_device_are_chosen_in_order() -> None:
    """Three modes of eight stages are 6561 choices: only those in which later stages recompute no more."""
    schedule = make("interleaved", placement("interleaved", ("a",), 8), 2)
    options = [[StageCost(1, 2, saved=10, taken=1, checkpoint=mode) for mode in CHECKPOINT_MODES] for _ in range(8)]
    chosen = auto_checkpoint(schedule, options, {"a": 60}, ("a",))
    assert simulate(schedule, chosen, (), ("a",)).high_water[0] <= 60
    places = [CHECKPOINT_MODES.index(cost.checkpoint) for cost in chosen]
    assert places == sorted(places, reverse=True)
    assert places[-1] == 0
    assert places[0] > 0


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_device_keeps_more_than_with_the_last_options(data: st.DataObject) -> None:
    schedule, options = data.draw(pipelines())
    options = [several[: data.draw(st.integers(1, 3))] for several in options]

    def peaks(costs: Sequence[StageCost]) -> tuple[int, ...]:
        return simulate(schedule, costs, (), DEVICES).high_water

    most = peaks([several[-1] for several in options])
    chosen = where_it_saves(lambda costs: schedule, options, DEVICES)
    assert all(peak <= limit for peak, limit in zip(peaks(chosen), most, strict=True))
    if len(options) == len(DEVICES):  # what one keeps does not depend on the other
        for s, several in enumerate(options):
            fits = (
                peaks([one if at == s else cost for at, cost in enumerate(chosen)])[s] <= most[s] for one in several
            )
            assert chosen[s] == several[next(at for at, fit in enumerate(fits) if fit)]
