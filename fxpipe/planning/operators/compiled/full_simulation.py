"""Compiled: the time of a strategy from nothing (the SOAP paper's algorithm 1). The task graph is made anew, every
computation and every message is a task of it, and all of them go through one queue in the order of (ready, key). It is
what `delta` is compared with: times equal to the last bit, and how much faster."""

from __future__ import annotations

import numpy as np

from .event_queue import before
from .flat_arrays import Floats, Ints, Problem, State
from .graph_update import build
from .numba_compiler import allocating, compiled


@allocating
def full(p: Problem, s: State, rows: Ints, devices: Ints, times: Floats) -> float:
    """Seconds of a strategy; `s` is room to work in, `times` for ready, start and end of each task: computations and
    gatherings by slots, then messages as they lie in `s`, then what devices pass on in groups. Minus one if there is no
    room for all messages."""
    if not build(p, s, rows, devices):
        return -1.0
    n, M, D = p.n, p.parts, p.devices
    slots = 2 * n * M
    messages = slots + p.groups
    exchanges = messages + s.top[0]
    count = exchanges + p.groups * D
    place = np.full(count, -1)
    seconds = np.zeros(count)
    key = np.zeros(count, np.int64)
    wide = len(p.source) * M + 2  # keys of messages lie between those of computations
    for t in range(slots):
        place[t] = s.task[t].place
        seconds[t] = s.task[t].span
    key[:messages] = np.arange(messages) * wide
    edge_from = np.empty(2 * s.top[0] + 4 * slots + p.groups * D, np.int64)
    edge_to = np.empty_like(edge_from)
    edges = 0
    exists = np.zeros(count, np.bool_)
    for i in range(n):
        for k in range(p.row_parts[s.row[i]]):
            forward, backward = i * M + k, (2 * n - 1 - i) * M + k
            exists[forward] = True
            exists[backward] = True
            if s.task[backward].waits == 0:
                edge_from[edges], edge_to[edges] = forward, backward
                edges += 1
            if p.group[i] >= 0:
                exists[slots + p.group[i]] = True
                edge_from[edges], edge_to[edges] = backward, slots + p.group[i]
                edges += 1
    for e in range(len(p.source)):
        for way in range(2):
            i, j = (p.source[e], p.target[e]) if way == 0 else (p.target[e], p.source[e])
            rows_of = s.forward_rows[e] if way == 0 else s.backward_rows[e]
            sender = i * M if way == 0 else (2 * n - 1 - i) * M
            receiver = j * M if way == 0 else (2 * n - 1 - j) * M
            for k in range(p.row_parts[s.row[i]]):
                for x in range(rows_of[k], rows_of[k + 1]):
                    edge_from[edges] = sender + k
                    if s.message[x].wire >= 0:
                        message = messages + x
                        exists[message] = True
                        place[message] = D + s.message[x].wire
                        seconds[message] = s.message[x].lasts
                        key[message] = key[sender + k] + 1 + e * M + s.message[x].peer
                        edge_to[edges] = message
                        edges += 1
                        edge_from[edges] = message
                    edge_to[edges] = receiver + s.message[x].peer
                    edges += 1
    for g in range(p.groups):
        for d in range(D):
            if s.sync[g, d].lasts > 0:
                task = exchanges + g * D + d
                exists[task] = True
                place[task] = D + s.sync[g, d].wire
                seconds[task] = s.sync[g, d].lasts
                key[task] = messages * wide + g * D + d
                edge_from[edges], edge_to[edges] = slots + g, task
                edges += 1
    first, after, waits = _successors(count, edge_from[:edges], edge_to[:edges])
    most = 0.0
    for _ in range(p.simulations):
        most = _algorithm_1(place, seconds, key, exists, first, after, waits.copy(), D + p.links, times)
    return most


@allocating
def _successors(count: int, edge_from: Ints, edge_to: Ints) -> tuple[Ints, Ints, Ints]:
    """The tasks after task t, `after[first[t] : first[t + 1]]`, and how many each waits for."""
    first = np.zeros(count + 1, np.int64)
    waits = np.zeros(count, np.int64)
    for x in range(len(edge_from)):
        first[edge_from[x] + 1] += 1
        waits[edge_to[x]] += 1
    first = np.cumsum(first)
    after = np.empty(len(edge_from), np.int64)
    filled = first[:-1].copy()
    for x in range(len(edge_from)):
        after[filled[edge_from[x]]] = edge_to[x]
        filled[edge_from[x]] += 1
    return first, after, waits


@allocating
def _algorithm_1(
    place: Ints,
    seconds: Floats,
    key: Ints,
    exists: Ints,
    first: Ints,
    after: Ints,
    waits: Ints,
    places: int,
    times: Floats,
) -> float:
    """Seconds until the last task has ended; ready, start and end of each go into `times`. `waits` are used up."""
    count = len(place)
    ready = np.zeros(count)
    free = np.zeros(places)
    queue = np.empty(count, np.int64)
    size = 0
    for task in range(count):
        if exists[task] and waits[task] == 0:
            size = _push(queue, size, task, ready, key)
    most = 0.0
    while size > 0:
        task = queue[0]
        size = _pop(queue, size, ready, key)
        start = ready[task]
        if place[task] >= 0:
            start = max(start, free[place[task]])
        end = start + seconds[task]
        if place[task] >= 0:
            free[place[task]] = end
        times[task, 0], times[task, 1], times[task, 2] = ready[task], start, end
        most = max(most, end)
        for x in range(first[task], first[task + 1]):
            one = after[x]
            ready[one] = max(ready[one], end)
            waits[one] -= 1
            if waits[one] == 0:
                size = _push(queue, size, one, ready, key)
    return most


@compiled
def _push(queue: Ints, size: int, task: int, ready: Floats, key: Ints) -> int:
    at = size
    while at > 0:
        up = (at - 1) >> 1
        other = queue[up]
        if before(ready[other], key[other], ready[task], key[task]):
            break
        queue[at] = other
        at = up
    queue[at] = task
    return size + 1


@compiled
def _pop(queue: Ints, size: int, ready: Floats, key: Ints) -> int:
    size -= 1
    task = queue[size]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        a, b = queue[down], queue[min(down + 1, size - 1)]
        if before(ready[b], key[b], ready[a], key[a]):
            down, a = down + 1, b
        if before(ready[task], key[task], ready[a], key[a]):
            break
        queue[at] = a
        at = down
    queue[at] = task
    return size
