"""How good a schedule is, counted as the papers count, so that their figures can be held against it.

The bubble is of the whole step, until the last device is done. Where a device goes on with its next step before the
others are done, what counts is the time between its own first and last action.

    zb-h2      first to last: no gap       whole step: idle 1
    device 0  F0  F1  F2  I0  W0  F3  I1  W1  I2  W2  I3  W3   .
    device 1   .  F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxpipe.ir.schedule.schedule import Action, Costs, Schedule, needs, starts
from fxpipe.schedules.dual_pipe_v import dual_pipe_v


def bubble(
    schedule: Schedule,
    forward: float = 1,
    backward: float = 2,
    input_gradient: float = 1,
    weight_gradient: float = 1,
) -> float:
    """The share of the devices' time that is idle, if stages are alike and moving values takes no time."""
    costs = Costs(forward, backward, input_gradient, weight_gradient)
    end = max((start + costs.of(action.kind) for action, start in starts(schedule, costs).items()), default=0)
    busy = sum(costs.of(action.kind) for action in schedule.place)
    return 1 - busy / (end * len(schedule.devices)) if end else 0.0


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Per device the most (stage, micro-batch) pairs whose activations it keeps at once: from the forward until the
    backward, or until both its halves, are done. A forward without a backward keeps nothing."""
    return tuple(max(_live(schedule, row), default=0) for row in schedule.devices)


def _live(schedule: Schedule, row: Sequence[Action]) -> Iterator[int]:
    halves = {"B": 1, "I": 2, "W": 2}
    live: dict[tuple[int, int], int] = {}
    for kind, *task in row:
        key = (task[0], task[1])
        if kind != "F":
            live[key] = live.get(key, 0) + 1
            if live[key] == halves[kind]:
                del live[key]
        elif Action("B", *key) in schedule.place or Action("W", *key) in schedule.place:
            live[key] = 0
        yield len(live)


def idle(schedule: Schedule, costs: Costs | None = None) -> tuple[float, ...]:
    """Per device the time that it does not compute, until the last device is done."""
    spans = _spans(schedule, costs or Costs())
    end = max((last for _, last, _ in spans), default=0.0)
    return tuple(end - busy for _, _, busy in spans)


def gaps(schedule: Schedule, costs: Costs | None = None) -> tuple[float, ...]:
    """Per device the time that it does not compute between its first action and its last."""
    return tuple(last - first - busy for first, last, busy in _spans(schedule, costs or Costs()))


def rolling_bubble(schedule: Schedule, costs: Costs | None = None) -> float:
    """The share of idle time where every device goes on with its next step at once: of the longest time from first to
    last action on any device, what the devices do not compute. It is how the zero bubble paper counts."""
    spans = _spans(schedule, costs or Costs())
    longest = max((last - first for first, last, _ in spans), default=0.0)
    return 1 - sum(busy for _, _, busy in spans) / (longest * len(spans)) if longest else 0.0


def _spans(schedule: Schedule, costs: Costs) -> list[tuple[float, float, float]]:
    """Per device its first start, its last end, and how long it computes."""
    start = starts(schedule, costs)
    return [
        (start[row[0]], start[row[-1]] + costs.of(row[-1].kind), sum(costs.of(action.kind) for action in row))
        if row
        else (0.0, 0.0, 0.0)
        for row in schedule.devices
    ]


class Kept(NamedTuple):
    """The bytes that one micro-batch of a stage keeps: `whole` from its forward until its B or I is done, and `half`
    from its I until its W."""

    whole: int
    half: int


def peak_bytes(schedule: Schedule, kept: Sequence[Kept]) -> tuple[int, ...]:
    """Per device the most bytes that it keeps at once, if each stage keeps what `kept` says. A forward without a
    backward keeps nothing.

    >>> from fxpipe.ir.schedule.schedule import parse
    >>> peak_bytes(parse("F0 F1 I0 I1 W0 W1"), [Kept(whole=10, half=6)])
    (20,)
    """
    return tuple(max(_bytes(schedule, row, kept), default=0) for row in schedule.devices)


def _bytes(schedule: Schedule, row: Sequence[Action], kept: Sequence[Kept]) -> Iterator[int]:
    """What the device keeps after each of its actions. While an action runs it still has all that was there before."""
    now = 0
    for kind, s, i in row:
        trains = Action("B", s, i) in schedule.place or Action("W", s, i) in schedule.place
        whole, half = kept[s]
        now += {"F": whole if trains else 0, "B": -whole, "I": half - whole, "W": -half}[kind]
        yield now


def idle_in_pairs(stages: int, chunks: int, pair: float, costs: Costs | None = None) -> tuple[float, ...]:
    """Per device the time that it is idle, until the last device is done, if a forward and the B right after it run as
    a pair: they start together and are both done `pair` later. It is the time that the published formula is about.

    >>> idle_in_pairs(stages=8, chunks=8, pair=3)  # (4 - 1) (3 + 2 - 3)
    (6, 6, 6, 6)
    """
    if chunks < stages:
        raise ValueError(f"{chunks} micro-batches are too few for pairs in {stages} stages; the form needs {stages}")
    each, schedule = costs or Costs(), dual_pipe_v(stages, chunks)
    rows = [deque(_pairs(row)) for row in schedule.devices]
    seconds = [[pair if len(cell) == 2 else each.of(cell[0].kind) for cell in row] for row in rows]
    free: list[float] = [0] * len(rows)
    done: dict[Action, float] = {}
    while any(rows):
        for device, row in enumerate(rows):
            while row and all(need in done for need in _before(schedule, row[0])):
                ready = max((done[need] for need in _before(schedule, row[0])), default=0)
                free[device] = max(free[device], ready) + seconds[device][-len(row)]
                done |= dict.fromkeys(row.popleft(), free[device])
    return tuple(max(free) - sum(busy) for busy in seconds)


def _pairs(row: Sequence[Action]) -> Iterator[Sequence[Action]]:
    """The row with each F and the B right after it as one."""
    for cell in re.finditer("FB|.", "".join(action.kind for action in row)):
        yield row[cell.start() : cell.end()]


def _before(schedule: Schedule, cell: Sequence[Action]) -> list[Action]:
    return [need for action in cell for need in needs(schedule, action)]
