"""What devices do, step by step: every fault is found and shown in its place."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest

from fxpipe.ir.program.device_programs import DevicePrograms, Message, Step, batches, check, show
from fxpipe.ir.program.transfers import add_transfers
from fxpipe.ir.schedule.schedule import Action
from tests.helpers.pipes import EARLY, TWO


def test_printed() -> None:
    rows = (
        (Step("run", Action("F", 0, 1)), Step("send", Message("x", 0, 1, 1))),
        (Step("reduce", Message("w", 1, 0)),),
    )
    assert (
        show(DevicePrograms("short", ("a", "b"), rows))
        == dedent("""
        short on 2 devices
        a
          run      0F1
          send     x[1]  0 -> 1
        b
          reduce   w  1 -> 0
    """).strip()
    )


def changed(device: int, change: object) -> DevicePrograms:
    """The programs of `TWO` with the row of one device changed."""
    programs = add_transfers(EARLY, TWO)
    rows = list(programs.rows)
    rows[device] = tuple(change(list(rows[device])))  # type: ignore[operator]
    return replace(programs, rows=tuple(rows))


def without(text: str) -> object:
    return lambda row: [step for step in row if str(step) != text]


def moved(text: str, to: int) -> object:
    def change(row: list[Step]) -> list[Step]:
        step = next(step for step in row if str(step) == text)
        row.remove(step)
        row.insert(to, step)
        return row

    return change


@pytest.mark.parametrize(
    ("device", "change", "message"),
    [
        (1, without("receive  x[1]  0 -> 1"), r"cuda:0: nobody receives x\[1\]  0 -> 1"),
        (0, without("send     mask[0]  0 -> 1"), r"cuda:1: nobody sends mask\[0\]  0 -> 1"),
        (0, lambda row: [*row, row[0]], "cuda:0: nobody receives w  0 -> 1"),
        (
            1,
            moved("receive  mask[0]  0 -> 1", 1),
            r"cuda:1: receives mask\[0\]  0 -> 1, but cuda:0 sends x\[0\]  0 -> 1 f",
        ),
        (
            0,
            moved("receive  gradient of x[0]  1 -> 0", 9),
            r"receives gradient of x\[0\]  1 -> 0 after 0B0, which takes",
        ),
        (
            1,
            lambda row: [Step("send", Message("z", 0, 1, 0)), *row],
            r"stage 0, which sends z\[0\]  0 -> 1, is not here",
        ),
        (1, lambda row: [Step("send", Message("z", 1, 7, 0)), *row], "for stage 7, which no device runs"),
        (0, moved("send     x[0]  0 -> 1", 12), "first"),
    ],
)
def test_faults(device: int, change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(changed(device, change))


def test_deadlock_is_shown_in_the_list() -> None:
    """Each of two devices sends before it has reached its receive: a channel with room for none would block both."""
    one, two = Message("x", 0, 1, 1), Message("x", 1, 0, 0, gradient=True)
    rows = (
        (Step("run", Action("F", 0, 1)), Step("send", one), Step("receive", two), Step("run", Action("B", 0, 0))),
        (Step("run", Action("B", 1, 0)), Step("send", two), Step("receive", one), Step("run", Action("F", 1, 1))),
    )
    with pytest.raises(ValueError, match="cannot run") as error:
        check(DevicePrograms("crossed", ("a", "b"), rows))
    assert (
        str(error.value).split("\n", 1)[1]
        == dedent("""
        a
          run      0F1
          send     x[1]  0 -> 1  <-- waits for ever for x[1]  0 -> 1
          receive  gradient of x[0]  1 -> 0
          run      0B0
    """).strip()
    )


def crossing(*rounds: int) -> DevicePrograms:
    """Two devices that each send, then receive, in these rounds: what is sent by the first, and by the second."""
    one, two = Message("x", 0, 1, 1), Message("y", 1, 0, 1)
    first, second = rounds
    rows = (
        (Step("run", Action("F", 0, 0)), Step("send", one, first), Step("receive", two, second)),
        (Step("run", Action("F", 1, 0)), Step("send", two, second), Step("receive", one, first)),
    )
    return DevicePrograms("crossing", ("a", "b"), rows)


def test_what_is_sent_and_received_together_does_not_wait_for_itself() -> None:
    check(crossing(3, 3))
    for rounds in ((3, 4), (0, 0)):
        with pytest.raises(ValueError, match="waits for ever"):
            check(crossing(*rounds))


def test_a_batch_ends_as_a_whole() -> None:
    """The first device's batch ends only after a message of the third, which waits for one that the second sends after
    a batch with the first: the two ends of each message stand in good order, and yet nothing goes on."""
    x, y, z = Message("x", 0, 1, 1), Message("y", 1, 2, 1), Message("z", 2, 0, 1)
    runs = [Step("run", Action("F", s, 0)) for s in range(3)]
    rows = (
        (runs[0], Step("send", x, 1), Step("receive", z, 1)),
        (runs[1], Step("receive", x, 1), Step("send", y, 2)),
        (runs[2], Step("receive", y, 2), Step("send", z, 1)),
    )
    with pytest.raises(ValueError, match="waits for ever for z"):
        check(DevicePrograms("chain", ("a", "b", "c"), rows))
    apart = (rows[0][0], Step("send", x, 1), Step("receive", z, 3))
    check(
        DevicePrograms("chain", ("a", "b", "c"), (apart, rows[1], (runs[2], Step("receive", y, 2), Step("send", z, 3))))
    )


def test_only_sends_and_receives_are_batched() -> None:
    """A reduction of the same round before them stands alone."""
    one, two = Message("w", 0, 1), Message("v", 1, 0)
    row = [Step("reduce", two, 5), Step("receive", two, 5), Step("send", one, 5), Step("send", one), Step("send", one)]
    assert [[at for at, _ in batch] for batch in batches(row)] == [[0], [1, 2], [3], [4]]
