"""Zero bubble: the backward in two halves; the half for which no other stage waits runs where a device would be idle.

The gradient of the input, I, is what the stage before waits for; the gradient of the weights, W, can come at any time
after it. So a device that would wait computes a W instead. (Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism.)

The idle time of a device from its first action to its last, and its peak of live micro-batches (until the W), for n
devices, at least 2n - 1 micro-batches, and F, I and W that take 1 each:

    1f1b     3 (n - 1)    n       n - 1 times F + I + W
    zb-h1        n - 1    n       n - 1 times F + I - W
    zb-h2            0    2n - 1
    zb-v             0    n       2n stages of half the size, two on each device, so 2n of those are live

The paper counts from first to last action: a device that has run its last action begins the next step and does not wait
for the others. It can do so if nothing in the step needs all devices at once, such as a norm of all gradients. Counted
until the last device is done, zb-h2 and zb-v are idle for n - 1, the time that the first micro-batch takes to reach the
last device.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.schedule.sub_schedule import only

from .row_builder import at_least_one, numbered

Cell = tuple[str, int]  # kind, stage


def zb_h1(stages: int, chunks: int) -> Schedule:
    """The order of 1F1B, with no more memory than its first device needs. Device s delays W by s micro-batches.

    >>> print(zb_h1(3, 4))
    zb-h1: 3 stages, 4 micro-batches
    clock      0   1   2   3   4   5   6   7   8   9  10  11  12  13
    device 0  F0  F1  F2          I0  W0  F3  I1  W1  I2  W2  I3  W3
    device 1      F0  F1      I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
    device 2          F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3
    """
    at_least_one(stages=stages, chunks=chunks)
    rows = (numbered(_row(s, chunks, ahead=stages - s, put_off=s)) for s in range(stages))
    return Schedule("zb-h1", tuple(rows))


def zb_h2(stages: int, chunks: int) -> Schedule:
    """Twice the memory, and no device idle between its first action and its last: device s starts backward after
    2 (n - s) - 1 forwards and delays W by 2 s micro-batches.

    >>> print(zb_h2(2, 4))
    zb-h2: 2 stages, 4 micro-batches
    clock      0   1   2   3   4   5   6   7   8   9  10  11  12
    device 0  F0  F1  F2  I0  W0  F3  I1  W1  I2  W2  I3  W3
    device 1      F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3
    """
    at_least_one(stages=stages, chunks=chunks)
    rows = (numbered(_row(s, chunks, ahead=2 * (stages - s) - 1, put_off=2 * s)) for s in range(stages))
    return Schedule("zb-h2", tuple(rows))


def _row(s: int, chunks: int, ahead: int, put_off: int) -> Iterator[Cell]:
    """`ahead` forwards, then in turns an I, the W of `put_off` micro-batches before it, and an F."""
    for _ in range(min(ahead, chunks)):
        yield "F", s
    for k in range(chunks + put_off):
        if k < chunks:
            yield "I", s
        if 0 <= k - put_off < chunks:
            yield "W", s
        if ahead + k < chunks:
            yield "F", s


def zb_v(stages: int, chunks: int) -> Schedule:
    """Two stages on each device, down and up again: device d runs the stages d and 2n - 1 - d. The first device has the
    last stage, so it can start backward at once. All devices have the same peak of memory, that of 1F1B's first device.

    The form needs 2n - 1 micro-batches; with fewer, the missing ones are taken out of it.

    >>> print(zb_v(stages=4, chunks=3))
    zb-v: 4 stages, 3 micro-batches
    clock       0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17   18
    device 0  0F0  0F1  0F2  3F0  3I0  3W0  3F1  3I1  3W1  0I0  0W0  3F2  3I2  3W2  0I1  0W1  0I2  0W2
    device 1       1F0  2F0  1F1  2F1  2I0  2W0  1F2  1I0  1W0  2F2  2I1  2W1  1I1  2I2  1I2  1W1  2W2  1W2
    """
    at_least_one(stages=stages, chunks=chunks)
    n = half(stages)
    whole = max(chunks, 2 * n - 1)
    return only(Schedule("zb-v", tuple(numbered(_v_row(d, n, whole)) for d in range(n))), chunks)


def half(stages: int) -> int:
    """The number of devices of a V of this many stages. Raises ValueError if the number is odd."""
    if stages % 2:
        raise ValueError(f"{stages} stages do not make a V; it needs two for each device")
    return stages // 2


def _v_row(d: int, n: int, chunks: int) -> Iterator[Cell]:
    down, up = d, 2 * n - 1 - d
    warm = 2 * (n - d) - 1 + d  # forwards of the stage on the way down before the first backward
    yield from [("F", down)] * (2 * (n - d) - 1)
    yield from [("F", up), ("F", down)] * d
    yield from [("F", up), ("I", up), ("W", up)] * (n - d)
    for k in range(chunks - n):  # the steady state: n forwards on the way up are done
        if warm + k < chunks:
            yield "F", down
        yield from [("I", down), ("W", down)]
        yield from [("F", up), ("I", up), ("W", up)]
    yield from [("I", down), ("I", up)] * d
    yield from [("I", down), ("W", down)] * (n - d)
    yield from [("W", up)] * d
    yield from [("W", down)] * d
