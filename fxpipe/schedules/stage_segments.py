"""A schedule of stages that several devices share: each action becomes those of the stage's segments.

    stage 0 is segment 0 on a, 1 on b, 2 on a; stage 1 is segment 3 on c

    stage 0   F0  F1  B0      B1          a   0F0 2F0 0F1 2F1 2B0 0B0         2B1 0B1
    stage 1       F0  B0  F1  B1          b   1F0     1F1         1B0             1B1
                                          c           3F0     3B0     3F1 3B1

Each device of a stage runs the stage's row with its own segments: forward in their order, backward in reverse. The
result runs if the schedule does: take an order in which the actions run, and put in place of each action all segments
of its stage; that is an order in which they run.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.ir.schedule.schedule import Action, Schedule


def segmented(
    schedule: Schedule, stages: Sequence[int], devices: Sequence[str], sources: Sequence[tuple[int, ...]]
) -> Schedule:
    """The schedule of segments. For each segment `stages` has its stage, `devices` its device, and `sources` the
    segments that it takes from. A device has segments of one stage only. Rows are in the order of the devices' first
    segments.

    >>> from .one_f_one_b import one_f_one_b
    >>> print(segmented(one_f_one_b(2, 2), (0, 0, 0, 1), ("a", "b", "a", "c"), ((), (), (0, 1), (2,))))
    1f1b: 4 stages, 2 micro-batches
    clock       0    1    2    3    4    5    6    7
    device 0  0F0  2F0  0F1  2F1  2B0  0B0  2B1  0B1
    device 1  1F0  1F1                 1B0       1B1
    device 2            3F0  3B0  3F1  3B1
    """
    row_of = {action.stage: row for row in schedule.devices for action in row}
    found = []
    for device in dict.fromkeys(devices):
        own = [segment for segment, label in enumerate(devices) if label == device]
        found.append(tuple(_actions(row_of[stages[own[0]]], stages, own)))
    return Schedule(schedule.name, tuple(found), tuple(map(tuple, sources)))


def _actions(row: Sequence[Action], stages: Sequence[int], own: Sequence[int]) -> list[Action]:
    return [
        Action(kind, segment, i)
        for kind, stage, i in row
        for segment in (own if kind == "F" else reversed(own))
        if stages[segment] == stage
    ]
