"""A schedule for fewer devices than it was made for, or for fewer micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .schedule import Action, Schedule, clocks


def share(schedule: Schedule, devices: Sequence[str]) -> Schedule:
    """The schedule with the rows of one device joined, in order of clocks. `devices` names the device of each row;
    devices keep the order of first appearance. Actions of one clock do not need each other, so the result runs if
    `schedule` does.

    >>> from .schedule import parse
    >>> print(share(parse("F0 F1 . . B1 B0 \\n . F0 F1 B1 B0", name="gpipe"), ("cuda:0", "cuda:0")))
    gpipe: 2 stages, 2 micro-batches
    clock       0    1    2    3    4    5    6    7
    device 0  0F0  0F1  1F0  1F1  1B1  0B1  1B0  0B0
    """
    rows: dict[str, list[tuple[int, Action]]] = {name: [] for name in devices}
    for name, column, row in zip(devices, clocks(schedule), schedule.devices, strict=True):
        rows[name] += zip(column, row, strict=True)
    merged = (sorted(row, key=lambda cell: (cell[0], cell[1].stage)) for row in rows.values())
    return replace(schedule, devices=tuple(tuple(action for _, action in row) for row in merged))


def only(schedule: Schedule, chunks: int) -> Schedule:
    """The schedule without the micro-batches from number `chunks` on, for a batch too small for all of them. It runs if
    `schedule` does, because no action needs one of another micro-batch.

    >>> from .schedule import parse
    >>> print(only(parse("F0 F1 . B0 F2 B1 . B2 \\n . F0 B0 F1 B1 F2 B2", name="1f1b"), chunks=2))
    1f1b: 2 stages, 2 micro-batches
    clock      0   1   2   3   4   5
    device 0  F0  F1      B0      B1
    device 1      F0  B0  F1  B1
    """
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; a schedule needs at least one")
    rows = (tuple(action for action in row if action.micro_batch < chunks) for row in schedule.devices)
    pairs = (one for one, other in schedule.beside.items() if max(one.micro_batch, other.micro_batch) < chunks)
    return replace(schedule, devices=tuple(rows), pairs=frozenset(pairs))
