"""What an idle device waits for."""

from __future__ import annotations

from itertools import pairwise

from fxpipe.ir.schedule.schedule import parse
from fxpipe.ir.timeline import Span, Timeline
from fxpipe.schedules.diagnosis.idle_causes import pieces
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate

ONE = parse("F0 . . B0 \n . F0 B0", name="gpipe")


def told(timeline: Timeline, device: str) -> list[tuple[float, float, str, str]]:
    found = pieces(timeline, ONE)
    return [(piece.start, piece.end, piece.cause, piece.by) for piece in found[device]]


def test_each_moment_has_its_cause() -> None:
    """Values take 3 seconds there, and their gradients 4 back. While device 1 waits for a value, so does device 0."""
    timeline = simulate(ONE, [StageCost(1, 2)] * 2, [Hop(0, 1, 3, 4)])
    there, back = "device 0 -> device 1", "device 1 -> device 0"
    assert told(timeline, "device 0") == [
        (0, 1, "compute", "device 0"),
        (1, 4, "transfer", there),
        (4, 5, "wait", "device 1"),
        (5, 7, "wait", "device 1"),
        (7, 11, "transfer", back),
        (11, 13, "compute", "device 0"),
    ]
    assert told(timeline, "device 1") == [
        (0, 1, "wait", "device 0"),
        (1, 4, "transfer", there),
        (4, 5, "compute", "device 1"),
        (5, 7, "compute", "device 1"),
        (7, 11, "transfer", back),
        (11, 13, "wait", "device 0"),
    ]


def test_what_is_late_for_no_reason_is_the_hosts() -> None:
    """From the call to its end: cutting the batch, a pause before B0 of device 1, adding gradients."""
    spans = (
        Span("a", 2, 3, "F", 0, 0),
        Span("b", 3, 4, "F", 1, 0),
        Span("b", 6, 7, "B", 1, 0),
        Span("a", 7, 8, "B", 0, 0),
    )
    timeline = Timeline("gpipe", ("a", "b"), spans, call=(0, 10))
    assert [piece for piece in told(timeline, "a") if piece[2] != "compute"] == [
        (0, 2, "host", "a"),
        (3, 4, "wait", "b"),
        (4, 6, "host", "b"),
        (6, 7, "wait", "b"),
        (8, 10, "host", "a"),
    ]


def test_clocks_that_disagree_lead_in_no_circle() -> None:
    """Device b ends before what it takes has been made: no cause is found, and every moment still has one."""
    spans = (
        Span("a", 5, 6, "F", 0, 0),
        Span("b", 0, 1, "F", 1, 0),
        Span("b", 2, 3, "B", 1, 0),
        Span("a", 6, 7, "B", 0, 0),
    )
    for device in "ab":
        found = told(Timeline("gpipe", ("a", "b"), spans), device)
        assert found[0][0] == 0
        assert found[-1][1] == 7
        assert all(one[1] == other[0] for one, other in pairwise(found))


def test_gradients_that_are_added_up_at_the_end_are_transfers() -> None:
    spans = (*simulate(ONE, [StageCost(1, 2)] * 2).spans, Span("all-reduce of a", 6, 8, "A", 0, 0))
    spans = tuple(
        Span({"device 0": "a", "device 1": "b"}.get(s.where, s.where), s.start, s.end, s.kind, s.stage, 0)
        for s in spans
    )
    timeline = Timeline("gpipe", ("a", "b"), spans, ("all-reduce of a",))
    assert told(timeline, "a")[-1] == told(timeline, "b")[-1] == (6, 8, "transfer", "all-reduce of a")
