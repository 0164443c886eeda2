"""Schedules with one stage per device. They differ only in how many forwards each device runs ahead.

A device runs its first K micro-batches forward (its warm-up), then one backward and one forward in turns until the
forwards run out, then the backwards that are left. It keeps at most K micro-batches in memory, however many there are.
In GPipe the warm-up is all micro-batches; DAPPLE and PipeDream-Flush start the backward early.

The bubble is the same for all: (n - 1) / (m + n - 1) of the time, if stages are alike (m micro-batches, n stages).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxpipe.ir.schedule.schedule import Action, Schedule

from .row_builder import at_least_one, turns


def gpipe(stages: int, chunks: int) -> Schedule:
    """All forwards, then all backwards, the last micro-batch first.

    >>> print(gpipe(3, 4))
    gpipe: 3 stages, 4 micro-batches
    clock      0   1   2   3   4   5   6   7   8   9  10  11
    device 0  F0  F1  F2  F3                  B3  B2  B1  B0
    device 1      F0  F1  F2  F3          B3  B2  B1  B0
    device 2          F0  F1  F2  F3  B3  B2  B1  B0
    """
    at_least_one(stages=stages, chunks=chunks)
    return Schedule("gpipe", tuple(_row(s, chunks, reversed(range(chunks))) for s in range(stages)))


def one_f_one_b(stages: int, chunks: int, warmup: Sequence[int] | None = None) -> Schedule:
    """One forward, one backward: device s starts backward after `warmup[s]` forwards, n - s if not given.

    >>> print(one_f_one_b(3, 4))
    1f1b: 3 stages, 4 micro-batches
    clock      0   1   2   3   4   5   6   7   8   9  10  11
    device 0  F0  F1  F2          B0  F3  B1      B2      B3
    device 1      F0  F1      B0  F2  B1  F3  B2      B3
    device 2          F0  B0  F1  B1  F2  B2  F3  B3

    >>> print(one_f_one_b(3, 4, warmup=late(3)))
    1f1b: 3 stages, 4 micro-batches
    clock      0   1   2   3   4   5   6   7   8   9  10  11
    device 0  F0  F1  F2  F3      B0      B1      B2      B3
    device 1      F0  F1  F2  B0  F3  B1      B2      B3
    device 2          F0  B0  F1  B1  F2  B2  F3  B3
    """
    at_least_one(stages=stages, chunks=chunks)
    ahead = early(stages) if warmup is None else tuple(warmup)
    if len(ahead) != stages:
        raise ValueError(f"warmup has {len(ahead)} numbers; {stages} stages need {stages}")
    if min(ahead) < 1:
        raise ValueError(f"warmup is {list(ahead)}; each device runs at least one forward before its first backward")
    for s in range(1, stages):
        if min(ahead[s], chunks) > ahead[s - 1]:
            raise ValueError(
                f"warmup is {list(ahead)}: device {s} would wait for ever for its forward {ahead[s - 1]}, because "
                f"device {s - 1} runs only {ahead[s - 1]} ahead; let the numbers fall from device to device"
            )
    return Schedule("1f1b", tuple(_row(s, ahead[s], range(chunks)) for s in range(stages)))


def forward_only(stages: int, chunks: int) -> Schedule:
    """Forwards alone, for inference.

    >>> print(forward_only(3, 4))
    forward only: 3 stages, 4 micro-batches
    clock      0   1   2   3   4   5
    device 0  F0  F1  F2  F3
    device 1      F0  F1  F2  F3
    device 2          F0  F1  F2  F3
    """
    at_least_one(stages=stages, chunks=chunks)
    rows = (tuple(Action("F", s, i) for i in range(chunks)) for s in range(stages))
    return Schedule("forward only", tuple(rows))


def early(stages: int, limit: int | None = None) -> tuple[int, ...]:
    """DAPPLE's warm-up P_A, n - s: the least that keeps all devices busy if transfers take no time. `limit` is how many
    micro-batches fit into the memory of a device.

    >>> early(4), early(4, limit=2)
    ((4, 3, 2, 1), (2, 2, 2, 1))
    """
    return tuple(_limited(stages - s, limit) for s in range(stages))


def late(stages: int, limit: int | None = None) -> tuple[int, ...]:
    """DAPPLE's warm-up P_B, 2 (n - s) - 1: further ahead, so that transfers have time.

    >>> late(4), late(4, limit=4)
    ((7, 5, 3, 1), (4, 4, 3, 1))
    """
    return tuple(_limited(2 * (stages - s) - 1, limit) for s in range(stages))


def _row(s: int, warmup: int, backwards: Iterable[int]) -> tuple[Action, ...]:
    """Device s: `warmup` forwards, then the backwards in this order, each followed by a forward while any are left."""
    after = [Action("B", s, i) for i in backwards]
    return turns([Action("F", s, i) for i in range(len(after))], after, warmup)


def _limited(wanted: int, limit: int | None) -> int:
    return wanted if limit is None else min(wanted, limit)
