"""Schedules by hand: what prints, what parses, and what each action needs."""

from __future__ import annotations

from itertools import pairwise
from textwrap import dedent

import pytest

from fxpipe.ir.schedule.schedule import Action, Schedule, at_once, dump_csv, load_csv, needs, order, parse, show
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.schedules.make_schedule import SCHEDULES, make, placement

EARLY = """
    early: 2 stages, 3 micro-batches
    clock      0   1   2   3   4   5   6   7
    device 0  F0  F1      B0  F2  B1      B2
    device 1      F0  B0  F1  B1  F2  B2
"""

# Two stages on each device, the second device turning back: stages 0 and 3 are neighbours of the caller.
TURN = """
    turn: 4 stages, 2 micro-batches
    clock       0    1    2    3    4    5    6    7    8    9
    device 0  0F0  0F1       3F0  3B0  3F1  3B1  0B0       0B1
    device 1       1F0  2F0  1F1  2F1  2B0  1B0  2B1  1B1
"""

# The backward in two halves on both devices; W fills what would be idle.
SPLIT = """
    split: 2 stages, 2 micro-batches
    clock      0   1   2   3   4   5   6
    device 0  F0  F1      I0  W0  I1  W1
    device 1      F0  I0  F1  I1  W0  W1
"""


def text(picture: str) -> str:
    return dedent(picture).strip()


@pytest.mark.parametrize("picture", [EARLY, TURN, SPLIT])
def test_grid_and_csv_round_trip(picture: str) -> None:
    schedule = parse(picture)
    check(schedule)
    assert show(schedule) == text(picture)
    assert parse(show(schedule)) == schedule
    assert load_csv(dump_csv(schedule), schedule.name) == schedule


def test_csv() -> None:
    assert dump_csv(parse(SPLIT)) == "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_bare_grid() -> None:
    by_hand = parse("F0 F1 . B0 F2 B1 . B2 \n . F0 B0 F1 B1 F2 B2")
    assert by_hand.devices == parse(EARLY).devices
    assert by_hand.name == "by hand"


def test_labels() -> None:
    grid = show(parse(EARLY), labels=("cuda:0", "cuda:1"))
    assert grid.splitlines()[2:] == ["cuda:0  F0  F1      B0  F2  B1      B2", "cuda:1      F0  B0  F1  B1  F2  B2"]
    assert parse(grid) == parse(EARLY)


def test_needs() -> None:
    turn, split = parse(TURN), parse(SPLIT)
    assert needs(turn, Action("F", 0, 1)) == ()
    assert needs(turn, Action("B", 1, 0)) == (Action("F", 1, 0), Action("B", 2, 0))
    assert needs(turn, Action("B", 3, 0)) == (Action("F", 3, 0),)
    assert needs(split, Action("I", 0, 1)) == (Action("F", 0, 1), Action("I", 1, 1))
    assert needs(split, Action("W", 0, 1)) == (Action("I", 0, 1),)


def test_order_runs_everything_after_what_it_needs() -> None:
    schedule = parse(TURN)
    actions, stuck = order(schedule)
    assert not stuck
    assert sorted(actions) == sorted(schedule.place)
    for position, action in enumerate(actions):
        assert set(needs(schedule, action)) <= set(actions[:position])


@pytest.mark.parametrize("name", SCHEDULES)
def test_order_changes_between_forward_and_backward_as_rarely_as_the_rows_allow(name: str) -> None:
    schedule = make(name, placement(name, ("a", "b", "c", "d")), 8)
    actions, stuck = order(schedule)
    assert not stuck
    done: set[Action] = set()
    for action in actions:
        assert done.issuperset(needs(schedule, action))
        done.add(action)
    assert [[action for action in actions if action in row] for row in schedule.devices] == list(
        map(list, schedule.devices)
    )
    turns = [sum(one.kind != other.kind for one, other in pairwise(row)) for row in (actions, *schedule.devices)]
    assert turns[0] <= 2 * max(turns[1:])  # of the device that changes most often; not of all devices together


def test_the_second_of_a_pair_follows_the_first() -> None:
    paired = parse("F0 F1+ B0 F2+ B1 B2 \n F0 B0 F1 B1 F2 B2")
    actions, _ = order(paired)
    for first, second in paired.beside.items():
        assert actions[actions.index(first) + 1] == second


def test_facts() -> None:
    assert parse(EARLY).stages == ((0,), (1,))
    assert parse(TURN).stages == ((0, 3), (1, 2))
    assert (parse(TURN).num_stages, parse(TURN).chunks) == (4, 2)


def test_empty() -> None:
    nothing = Schedule("nothing", ((), ()))
    check(nothing)
    assert nothing.chunks == 0
    assert parse(show(nothing)) == nothing


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("F0 X1", "device 0: 'X1' is not an action; write F0, or 2F0 with the stage"),
        ("X0 F1", "device 0: 'X0' is not an action"),
        ("0F0 0B0 \n F0 B0", "device 1: 'F0' has no stage, as others have; write 1F0"),
    ],
)
def test_text_that_is_no_grid(grid: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(grid)


def test_backward_that_follows_at_once() -> None:
    schedule = parse("F0 F1 B0 B1 \n F0 B0 F1 B1", name="early")
    assert [at_once(schedule, s, i) for s in (0, 1) for i in (0, 1)] == [False, False, True, True]
    split = parse("F0 I0 W0 F1 W1 I1", name="split")
    assert at_once(split, 0, 0)
    assert not at_once(split, 0, 1)
