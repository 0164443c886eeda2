"""Pairs of a forward and a backward: which there are, that they can run, and what they cost."""

from __future__ import annotations

import pytest

from fxpipe.ir.schedule.schedule import Action, Schedule, dump_csv, load_csv, needs, order, parse, show
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.ir.schedule.sub_schedule import only
from fxpipe.schedules.make_schedule import make, placement
from fxpipe.schedules.overlap_pairs import overlap_pairs, overlapped
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate


def seconds(schedule: Schedule) -> float:
    stages = range(schedule.num_stages)
    return simulate(schedule, [StageCost(1, 2)] * len(stages), [Hop(s, s + 1, 0.1, 0.1) for s in stages[:-1]]).makespan


def paired(schedule: Schedule) -> Schedule:
    return overlap_pairs(schedule, (), seconds)


@pytest.mark.parametrize("name", ["1f1b", "1f1b-late", "dualpipe-v"])
@pytest.mark.parametrize("chunks", [1, 5, 8])
def test_a_schedule_in_pairs_has_the_same_actions_and_runs(name: str, chunks: int) -> None:
    plain = make(name, placement(name, ("a", "b", "c")), chunks)
    found = paired(plain)
    check(found)
    assert set(found.place) == set(plain.place)
    assert bool(found.pairs) == (chunks > 1)
    for forward, backward in found.beside.items():
        assert (forward.kind, backward.kind) == ("F", "B")
        assert forward.micro_batch != backward.micro_batch
        assert {*needs(plain, forward), *needs(plain, backward)} <= {
            one for need in needs(found, forward) for one in (need, *(f for f, b in found.beside.items() if b == need))
        }
    check(only(found, max(1, chunks - 1)))


def test_pairs_of_the_late_schedule_cost_the_fill_alone_and_those_of_1f1b_much_more() -> None:
    late, early = (make(name, ("a", "b", "c", "d"), 32) for name in ("1f1b-late", "1f1b"))
    assert seconds(paired(late)) < 1.05 * seconds(late)
    assert seconds(paired(early)) > 1.5 * seconds(early)


def test_a_pair_starts_when_both_may_and_sends_when_both_are_done() -> None:
    found = parse("F0 F1 . . F2+ B0 B1 B2 \n . F0 B0 F1 B1 F2 B2")
    timeline = simulate(found, [StageCost(1, 2)] * 2, [Hop(0, 1, 1, 1)])
    spans = {(span.kind, span.stage, span.micro_batch): span for span in timeline.spans}
    assert spans["F", 0, 2].start == spans["B", 1, 0].end + 1
    assert spans["F", 1, 2].start >= spans["B", 0, 0].end + 1


def test_pairs_that_would_wait_for_each_other_stay_two_actions() -> None:
    both = parse("F0 F1+ B0 B1 \n . F0 F1+ B0 B1")
    assert order(both)[1]
    with pytest.raises(ValueError, match="F1 of stage 0 waits for B0 of stage 1 on device 1, which never comes"):
        check(both)
    plain = parse("F0 F1 . B0 B1 \n . F0 F1 B0 B1")
    assert len(paired(plain).pairs) == 1


def test_a_backward_stays_before_the_forward_that_waits_for_it() -> None:
    """Stage 1 cannot take F1 with B0 where stage 0 runs F1 only once it has the gradient of B0."""
    plain = parse("F0 B0 F1 B1 F2 B2 \n F0 B0 F1 B1 F2 B2")
    assert paired(plain) == plain
    assert overlap_pairs(plain, [0], seconds) == plain


def test_stages_that_do_not_fit_are_not_paired() -> None:
    plain = make("dualpipe-v", ("a", "b", "b", "a"), 8)
    found = overlap_pairs(plain, [1], seconds)
    assert found.pairs
    assert all(1 not in (forward.stage, backward.stage) for forward, backward in found.beside.items())
    assert overlap_pairs(plain, range(4), seconds) == plain


def test_what_is_said_of_pairs() -> None:
    plain = make("dualpipe-v", ("a", "b", "b", "a"), 8)
    found, lines = overlapped(plain, [1], seconds, lambda schedule: True)
    assert found == overlap_pairs(plain, [1], seconds)
    assert f"{len(found.pairs)} of a forward and a backward" in lines[0]
    assert lines[1:] == ("overlapped pairs: none of stage 1, without backward as code",)
    assert overlapped(plain, [], seconds, lambda schedule: False)[0] == plain
    assert "gpipe has no forward beside" in overlapped(make("gpipe", ("a", "b"), 4), [], seconds, bool)[1][0]


def test_pairs_are_printed_and_read_back() -> None:
    found = paired(make("dualpipe-v", ("a", "b", "b", "a"), 6))
    assert parse(show(found)) == found
    assert load_csv(dump_csv(found), found.name) == found


@pytest.mark.parametrize("grid", ["F0+ B0", "F0 F1 B0 B1+", "F0+ F1 B0 B1"])
def test_what_is_no_pair_is_refused(grid: str) -> None:
    with pytest.raises(ValueError, match="has no B of another micro-batch behind it"):
        check(parse(grid))


def test_fewer_micro_batches_leave_out_broken_pairs() -> None:
    found = parse("F0 F1 F2+ B0 B1 B2")
    assert only(found, 2).pairs == frozenset()
    assert only(found, 3).pairs == {Action("F", 0, 2)}
