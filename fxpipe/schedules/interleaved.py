"""Schedules of several stages per device, dealt to devices in turn: stage s is on device s % n.

Smaller stages reach the last device sooner, so the bubble shrinks by the number of stages per device, v. Each round of
n stages is a loop. The schedules differ in what goes first, the next micro-batch or the next loop:

- interleaved one-forward-one-backward (Megatron) takes n micro-batches through all loops, then the next n, and starts
  backward as soon as the first has come through: memory does not grow with the micro-batches;
- looped breadth-first (Lamy-Poirier) takes all micro-batches through a loop, then through the next: all of them stay in
  memory, but each stage is used in one go, which is what sharded weights want.

With m >= n micro-batches both leave each device idle for (n - 1) (F + B), with F and B of one of these small stages: a
share of (n - 1) / (v m + n - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fxpipe.ir.schedule.schedule import Action, Schedule

from .one_f_one_b import early, late
from .row_builder import at_least_one, turns


def interleaved(stages: int, chunks: int, devices: int, warmup: Sequence[int] | None = None) -> Schedule:
    """One forward, one backward through several loops: device d starts backward after `warmup[d]` forwards.

    If `warmup` is not given, it is the least that keeps the devices busy, (v - 1) g + n - d where g is the size of the
    largest group (`groups`); `interleaved_late` is further ahead. Any number of micro-batches will do.

    >>> print(interleaved(stages=4, chunks=3, devices=2))
    interleaved: 4 stages, 3 micro-batches
    clock       0    1    2    3    4    5    6    7    8    9   10   11   12   13
    device 0  0F0  0F1  0F2  2F0  2F1       2B0  2F2  2B1       2B2  0B0  0B1  0B2
    device 1       1F0  1F1  1F2  3F0  3B0  3F1  3B1  3F2  3B2  1B0  1B1  1B2
    """
    loops = _loops(stages, chunks, devices)
    ahead = _ahead(early(devices), loops, devices, chunks) if warmup is None else tuple(warmup)
    if len(ahead) != devices:
        raise ValueError(f"warmup has {len(ahead)} numbers; {devices} devices need {devices}")
    # Made as if the last loop were complete, then without the missing stages: so devices agree on the order.
    rows = (turns(*_tasks(loops * devices, chunks, devices, d), ahead[d]) for d in range(devices))
    there = (tuple(action for action in row if action.stage < stages) for row in rows)
    return Schedule("interleaved", tuple(there))


def interleaved_late(stages: int, chunks: int, devices: int) -> Schedule:
    """`interleaved` with Megatron's warm-up, (v - 1) g + 2 (n - d) - 1 forwards on device d: more than the least, so
    that values have time to move."""
    ahead = _ahead(late(devices), _loops(stages, chunks, devices), devices, chunks)
    return Schedule("interleaved-late", interleaved(stages, chunks, devices, ahead).devices)


def looped_bfs(stages: int, chunks: int, devices: int) -> Schedule:
    """All micro-batches go forward through one loop before the next, and backward likewise, the last micro-batch first.

    >>> print(looped_bfs(stages=4, chunks=2, devices=2))
    looped-bfs: 4 stages, 2 micro-batches
    clock       0    1    2    3    4    5    6    7    8    9
    device 0  0F0  0F1  2F0  2F1            2B1  2B0  0B1  0B0
    device 1       1F0  1F1  3F0  3F1  3B1  3B0  1B1  1B0
    """
    _loops(stages, chunks, devices)
    rows: list[tuple[Action, ...]] = []
    for d in range(devices):
        forwards = tuple(Action("F", s, i) for s in range(d, stages, devices) for i in range(chunks))
        rows.append((*forwards, *(action._replace(kind="B") for action in reversed(forwards))))
    return Schedule("looped-bfs", tuple(rows))


def groups(chunks: int, devices: int) -> tuple[range, ...]:
    """The micro-batches that go through all loops together: groups as even as possible, of at least one micro-batch for
    each device, so that the first is back at device 0 when the last has left it. (With groups of n and a smaller last
    one, devices would be idle in the last group.)

    >>> groups(8, devices=4), groups(7, devices=3)
    ((range(0, 4), range(4, 8)), (range(0, 4), range(4, 7)))
    """
    count = max(chunks // devices, 1)
    size, larger = divmod(chunks, count)
    edges = [k * size + min(k, larger) for k in range(count + 1)]
    return tuple(range(a, b) for a, b in pairwise(edges))


def _loops(stages: int, chunks: int, devices: int) -> int:
    at_least_one(stages=stages, chunks=chunks, devices=devices)
    return -(-stages // devices)


def _ahead(last_loop: Sequence[int], loops: int, devices: int, chunks: int) -> tuple[int, ...]:
    """The warm-up of each device: that of its last loop, after the forwards of all loops before."""
    largest = max(map(len, groups(chunks, devices)))
    return tuple((loops - 1) * largest + ahead for ahead in last_loop)


def _tasks(stages: int, chunks: int, devices: int, d: int) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of device d, each in their order."""
    mine = range(d, stages, devices)
    together = groups(chunks, devices)
    forwards = [Action("F", s, i) for group in together for s in mine for i in group]
    backwards = [Action("B", s, i) for group in together for s in reversed(mine) for i in group]
    return forwards, backwards
