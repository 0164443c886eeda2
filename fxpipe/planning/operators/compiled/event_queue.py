"""Compiled: the queue of a simulation, a binary heap of (time, key). The earliest event comes first, and of those at
one time the one with the smallest key. A task in slot t becomes ready with key 2 t and has finished with 2 t + 1."""

from __future__ import annotations

from .flat_arrays import Records
from .numba_compiler import compiled


@compiled
def before(time: float, key: int, other_time: float, other_key: int) -> bool:
    """Whether one event comes before another."""
    return time < other_time or (time == other_time and key < other_key)


@compiled
def push(queue: Records, size: int, time: float, key: int) -> int:
    """Put an event into the heap. Returns its new size."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if before(queue[up].time, queue[up].key, time, key):
            break
        queue[at].time = queue[up].time
        queue[at].key = queue[up].key
        at = up
    queue[at].time = time
    queue[at].key = key
    return size + 1


@compiled
def pop(queue: Records, size: int) -> int:
    """Remove the first event from the heap; read `queue[0]` before. Returns the new size."""
    size -= 1
    time, key = queue[size].time, queue[size].key
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        right = down + 1
        if right < size and before(queue[right].time, queue[right].key, queue[down].time, queue[down].key):
            down = right
        if before(time, key, queue[down].time, queue[down].key):
            break
        queue[at].time = queue[down].time
        queue[at].key = queue[down].key
        at = down
    queue[at].time = time
    queue[at].key = key
    return size


@compiled
def arrive(arrival: Records, queue: Records, size: int, slot: int, time: float) -> int:
    """One thing that the task in `slot` waits for arrives at `time`; with the last one the task is ready. Returns the
    size of the queue."""
    arrival[slot].pending -= 1
    if time > arrival[slot].latest:
        arrival[slot].latest = time
    if arrival[slot].pending == 0:
        size = push(queue, size, arrival[slot].latest, 2 * slot)
    return size
