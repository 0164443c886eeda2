"""DualPipe, cut in half: a V of two stages per device in which forwards and backwards run in pairs.

DualPipe (DeepSeek-V3) runs two pipelines through the same devices in opposite directions, so that each device always
has a forward and a backward of different micro-batches to run as a pair: one computes while the values of the other
move. Its second half mirrors the first; without it a V is left (Sea AI Lab, "Cut-in-half").

Published, for n devices (DeepSeek's table, where PP is the number of stages, 2n): the bubble is
(n - 1) (F&B + B - 3W), and 2n + 1 (stage, micro-batch) pairs are live on each device. F&B is the time of an overlapped
pair. A row here runs one action at a time, so F&B is at most F + B, and the result of a forward can leave before the
backward beside it is done: if F, I and W take 1 each, a device is idle for n - 1, not for 2 (n - 1).
`benchmarks.schedule_measures.idle_in_pairs` runs the same rows with pairs, and gets the published bubble; with
overlap_pairs=True the pairs run as one action (`overlap_pairs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.schedule.sub_schedule import only

from .row_builder import at_least_one, numbered
from .zero_bubble import Cell, half


def dual_pipe_v(stages: int, chunks: int) -> Schedule:
    """Device d of n runs the stages d and 2n - 1 - d; a backward is in one piece, except where its halves fill gaps.

    The form needs 2n micro-batches; with fewer, the missing ones are taken out of it.

    >>> print(dual_pipe_v(stages=4, chunks=4))
    dualpipe-v: 4 stages, 4 micro-batches
    clock       0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17   18
    device 0  0F0  0F1  0F2  3F0  3I0  3W0  3F1  0F3  3B1  3F2  0B0  3B2  3F3  0B1  3B3  0I2  0W2  0I3  0W3
    device 1       1F0  2F0  1F1  2F1  1F2  2B0  2F2  1B0  1F3  2B1  2F3  1B1  2B2  1B2  2I3  1I3  2W3  1W3
    """
    at_least_one(stages=stages, chunks=chunks)
    n = half(stages)
    whole = max(chunks, 2 * n)
    return only(Schedule("dualpipe-v", tuple(numbered(_row(d, n, whole)) for d in range(n))), chunks)


def _row(d: int, n: int, chunks: int) -> Iterator[Cell]:
    down, up, rest = d, 2 * n - 1 - d, n - 1 - d
    yield from [("F", down)] * (2 * rest)
    yield from [("F", down), ("F", up)] * (d + 1)
    yield from [("I", up), ("W", up), ("F", up)] * rest
    yield from [("F", down), ("B", up), ("F", up), ("B", down)] * (chunks - 2 * n + d + 1)
    yield from [("B", up), ("F", up), ("B", down)] * rest
    # No forwards are left. From here half of the backwards are split, and their weight gradients fill the gaps.
    last = [up, down] * (d + 1)
    yield from (("B", s) for s in last[: d + 1])
    split = [*last[d + 1 :], *[down] * rest]
    yield from (("I", s) for s in split[: d + 1])
    for owed, s in zip(split[:rest], split[d + 1 :], strict=True):
        yield from [("W", owed), ("I", s)]
    yield from (("W", s) for s in split[rest:])
