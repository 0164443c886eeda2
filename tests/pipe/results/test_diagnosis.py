"""The text of a diagnosis names the largest loss, who causes it, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.schedule.schedule import Action
from fxpipe.ir.timeline import Timeline
from fxpipe.pipe.results.diagnosis import Diagnosis
from fxpipe.pipe.results.replanned import Replanned
from fxpipe.schedules.diagnosis.time_split import split
from fxpipe.schedules.one_f_one_b import one_f_one_b
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate

DEVICES = tuple(f"cpu:{k}" for k in range(4))
PLAN = Plan("Net", tuple(StagePlan((f"op_{k}",), label, "never") for k, label in enumerate(DEVICES)), 16)
FREE = [Hop(s, s + 1, 0, 0) for s in range(3)]


def unasked() -> Replanned:
    raise AssertionError("no one asks for another plan")


def diagnosed(
    chunks: int = 16,
    slow: Mapping[int, float] | None = None,
    expected: bool = True,
    hops: Sequence[Hop] = FREE,
    checkpoint: str = "never",
    pause: Mapping[Action, float] | None = None,
    computing: float = 1.0,
) -> Diagnosis:
    """A step of four stages; `slow` has the factor of a stage, which the plan knows if it is `expected`; `computing`
    is the part of the time of an action for which it runs."""
    schedule = one_f_one_b(4, chunks)

    def simulated(factors: Mapping[int, float], more: Mapping[Action, float]) -> Timeline:
        times = {a: (2.0 if a.kind == "B" else 1.0) * factors.get(a.stage, 1) for a in schedule.place}
        return simulate(schedule, [StageCost(1, 2, checkpoint=checkpoint)] * 4, hops, DEVICES, took=times | dict(more))

    measured = simulated(slow or {}, pause or {})
    spans = tuple(replace(s, end=s.start + s.seconds * computing) if s.where in DEVICES else s for s in measured.spans)
    measured = replace(measured, spans=spans)
    predicted = simulated(slow or {} if expected else {}, {})
    return Diagnosis(
        PLAN, "1f1b", chunks, split(measured, schedule, predicted), split(predicted, schedule), measured, unasked
    )


@pytest.mark.parametrize(
    ("found", "largest", "words"),
    [
        (diagnosed(chunks=1), "bubble", ["only one device works at a time", "chunks="]),
        (diagnosed(), "bubble", ["more than 16", "'zb-h1'"]),
        (diagnosed(slow={2: 3}), "imbalance", ["cpu:2, with stage 2, computes 144 s", "72 s", "profile='measure'"]),
        (diagnosed(slow={2: 3}, expected=False), "stragglers", ["cpu:2 takes 3.0 times as long", "profile='measure'"]),
        (diagnosed(pause={Action("B", 1, 7): 40}), "stragglers", ["of cpu:1", "backward of stage 1, micro-batch 7"]),
        (diagnosed(hops=[Hop(1, 2, 9, 0, "h"), *FREE]), "transfers", ["cpu:1 -> cpu:2, most of it for h"]),
        (diagnosed(chunks=64, checkpoint="always"), "recomputation", ["checkpoint='never'"]),
        (diagnosed(computing=0.3), "host", ["fewer chunks=", "half of the actions take less than"]),
    ],
)
def test_the_largest_loss_is_named(found: Diagnosis, largest: str, words: list[str]) -> None:
    assert found.largest == largest
    name = "schedule's bubble" if largest == "bubble" else largest  # some of all that is idle, the timeline's bubble
    assert f"The largest loss is {name}: " in str(found)
    for word in words:
        assert word in found.advice


def test_what_is_small_needs_no_change() -> None:
    assert diagnosed(chunks=120).advice == (
        "The devices compute 98% of the time. No loss is large: the largest is schedule's bubble, 2%."
    )


TABLE = """
1f1b, 2 micro-batches: 19 s; the plan predicts 19 s
             computing    recomputation    schedule's bubble    imbalance    transfers    host    stragglers    step
cpu:0             12 s              0 s                  7 s          0 s          0 s     0 s           0 s    19 s
cpu:1              6 s              0 s               11.2 s       1.75 s          0 s     0 s           0 s    19 s
cpu:2              6 s              0 s               11.2 s       1.75 s          0 s     0 s           0 s    19 s
cpu:3              6 s              0 s               11.2 s       1.75 s          0 s     0 s           0 s    19 s
mean             7.5 s              0 s               10.2 s       1.31 s          0 s     0 s           0 s    19 s
predicted        7.5 s              0 s               10.2 s       1.31 s          0 s     0 s           0 s    19 s
"""


def test_the_table() -> None:
    """A step of two micro-batches: with equal stages each device would wait for three of 3.75 s."""
    table, _, advice = str(diagnosed(chunks=2, slow={0: 2})).rpartition("\n")
    assert table == TABLE.strip()
    assert advice.startswith("The largest loss is schedule's bubble: 54% of the devices' time. ")


def test_the_step_with_and_without_its_call() -> None:
    """Both are called by their names, and what is idle is that of the timeline."""
    found = diagnosed(chunks=2)
    line = replace(found.timeline, call=(-0.5, found.timeline.end + 1.5))
    timed = replace(found, timeline=line, measured=split(line, one_f_one_b(4, 2)))
    assert timed.head == (
        "1f1b, 2 micro-batches: 17 s from call to return, 15 s from first to last action, in which devices are idle "
        f"for {line.bubble:.1%}; the plan predicts 15 s"
    )
