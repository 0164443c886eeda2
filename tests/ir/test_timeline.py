"""Timelines by hand: what is derived, what is refused, and the two texts."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest

from benchmarks.schedule_measures import bubble
from fxpipe.ir.schedule.schedule import Costs, parse
from fxpipe.ir.timeline import KEPT, Span, Timeline, check, compare, dump, even, load, show, with_memory_of

# Two devices, a value from one to the other: forward 2 ms, transfer 1 ms, backward 3 ms.
#
#     ms        0  1  2  3  4  5  6  7  8  9  10 11 12
#     left      F0 F0                         B0 B0 B0
#     wire            T0             .. T0
#     right              F0 F0 B0 B0 B0
SPANS = (
    Span("left", 0.000, 0.002, "F", 0, 0),
    Span("left -> right", 0.002, 0.003, "T", 0, 0, "x"),
    Span("right", 0.003, 0.005, "F", 1, 0),
    Span("right", 0.005, 0.008, "B", 1, 0),
    Span("right -> left", 0.008, 0.009, "T", 1, 0, "gradient of x"),
    Span("left", 0.009, 0.012, "B", 0, 0),
)
MEMORY = (((0.0, 500), (0.012, 100)), ((0.0, 0), (0.003, 2500), (0.008, 0)))
STEP = Timeline("step", ("left", "right"), SPANS, ("left -> right", "right -> left"), MEMORY)


def text(picture: str) -> str:
    return dedent(picture).strip()


def test_derived() -> None:
    check(STEP)
    assert STEP.makespan == pytest.approx(0.012)
    assert STEP.busy == pytest.approx((0.005, 0.005))
    assert STEP.idle == pytest.approx((0.007, 0.007))
    assert STEP.bubble == pytest.approx(7 / 12)
    assert STEP.high_water == (500, 2500)
    assert [span.kind for span in STEP.on("right")] == ["F", "B"]
    assert STEP.on("elsewhere") == ()


def test_a_measured_run_may_start_at_any_time() -> None:
    later = replace(STEP, spans=tuple(replace(s, start=s.start + 7, end=s.end + 7) for s in SPANS))
    assert later.makespan == pytest.approx(STEP.makespan)
    assert later.bubble == pytest.approx(STEP.bubble)


def test_empty() -> None:
    nothing = Timeline("nothing", ("left",), ())
    check(nothing)
    assert (nothing.makespan, nothing.busy, nothing.bubble, nothing.high_water) == (0.0, (0.0,), 0.0, ())
    assert load(dump(nothing)) == nothing
    assert show(nothing).splitlines()[-1].split() == ["left", "0", "s", "0", "s", "-"]


def test_show() -> None:
    assert show(STEP) == text("""
        step: 12 ms, bubble 58.3%
        device    busy    idle    peak memory
        left      5 ms    7 ms    500 B
        right     5 ms    7 ms    2.5 kB
    """)


def test_compare() -> None:
    slower = replace(STEP, spans=(*SPANS[:-1], replace(SPANS[-1], end=0.015)))
    assert (
        "\n" + compare(STEP, slower)
        == dedent("""
                           predicted    measured    off
        step               12 ms        15 ms       -20.0%
        bubble             58.3%        56.7%
        left busy          5 ms         8 ms        -37.5%
        right busy         5 ms         5 ms        +0.0%
        left peak memory   500 B        500 B       +0.0%
        right peak memory  2.5 kB       2.5 kB      +0.0%
    """).rstrip()
    )
    with pytest.raises(ValueError, match="cannot compare 2 devices with 1"):
        compare(STEP, Timeline("one", ("left",), ()))


def test_memory_of_another_run_moves_with_the_actions() -> None:
    """Where it was counted at each; else only the peak is known."""
    row = [span for span in STEP.spans if span.where == "left"]
    ends = [at for span in row for at in (span.start, span.end)]
    half = replace(STEP, spans=tuple(replace(span, start=span.start / 2, end=span.end / 2) for span in STEP.spans))
    counted = tuple((at / 2, number) for number, at in enumerate(ends))
    half = replace(half, memory=(counted, ((0.0, 3), (0.001, 7))), counts=KEPT)
    found = with_memory_of(STEP, half)
    assert found.memory == (tuple((at, number) for number, at in enumerate(ends)), ((STEP.start, 7),))
    assert (found.spans, found.counts) == (STEP.spans, KEPT)
    assert "kept for backward" in show(found).splitlines()[1]


def test_json() -> None:
    assert load(dump(STEP)) == STEP
    assert '  {"where": "left", "start": 0' in dump(STEP), "a span a line: made for diff"
    for broken in ("", "[]", "{}", dump(STEP).replace('"spans"', '"span"')):
        with pytest.raises(ValueError, match=r"not JSON|: write|no field here"):
            load(broken)


def test_even() -> None:
    schedule = parse("F0 F1 . . . B0 B1 \n . F0 B0 . F1 B1", name="early")
    timeline = even(schedule, Costs(forward=1, backward=3), labels=("a", "b"))
    check(timeline)
    assert timeline.bubble == pytest.approx(bubble(schedule, 1, 3))
    assert [(s.kind, s.micro_batch, s.start, s.end) for s in timeline.on("b")] == [
        ("F", 0, 1, 2), ("B", 0, 2, 5), ("F", 1, 5, 6), ("B", 1, 6, 9),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(SPANS[2], start=0.001, end=0.004, where="left"), "left does two things at once: forward of stage 0"),
        (replace(SPANS[2], end=0.002), "on right, a span ends before it starts"),
        (replace(SPANS[2], where="nowhere"), "on 'nowhere', which the timeline does not have"),
        (replace(SPANS[2], kind="X"), "a span of kind 'X'"),
    ],
)
def test_refused(broken: Span, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(replace(STEP, spans=(*SPANS[:2], broken, *SPANS[3:])))


def test_links_may_carry_two_things_at_once() -> None:
    check(replace(STEP, spans=(*SPANS, Span("left -> right", 0.002, 0.003, "T", 0, 0, "mask"))))
