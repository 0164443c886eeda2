"""Compiled: the time of a strategy that differs from the last one in one operator (the SOAP paper's algorithm 2).

    change     new rows for the edges of the operator; all others stay as they are
    restart    the state of the simulation just before the first event that the change can touch, from the times at hand
    run        the rest of the simulation
    keep       the new times become the times at hand; or `take_back`: the old rows are the rows again

The paper propagates changes from task to task until nothing changes any more. In a training step most of what comes
after a change moves a little, so going on with the simulation from the first change touches hardly more tasks, and each
once. Everything earlier is left alone, and the task graph is never rebuilt.

Only computations are events. A message's turn on its link comes by when its sender has finished, so the sender's
finish hands out all of its messages, in the order of their keys. Two events of one time come in the order of their
slots. Slots are keys: no task has a smaller one than what it waits for. So each device and each link sees its tasks in
the order of (ready, key), exactly as in `simulate.run`.

A strategy that can be seen to take longer than `limit` is given up: a device or a link has so much left to do that it
ends too late even without waiting. The margin keeps rounding from giving up one that would just have been within.
"""

from __future__ import annotations

import numpy as np

from .arrays import Floats, Ints, Problem, Records, State
from .compiled import compiled
from .edges import count_waits, exchange, hold, join

MARGIN = 1 + 1e-9


@compiled
def push(queue: Records, size: int, time: float, key: int) -> int:
    """Into a binary heap of (time, key)."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if queue[up].time < time or (queue[up].time == time and queue[up].key < key):
            break
        queue[at].time = queue[up].time
        queue[at].key = queue[up].key
        at = up
    queue[at].time = time
    queue[at].key = key
    return size + 1


@compiled
def pop(queue: Records, size: int) -> int:
    """Take the first out of the heap; it must have been read before."""
    size -= 1
    time, key = queue[size].time, queue[size].key
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        right = down + 1
        if right < size and (
            queue[right].time < queue[down].time
            or (queue[right].time == queue[down].time and queue[right].key < queue[down].key)
        ):
            down = right
        if time < queue[down].time or (time == queue[down].time and key < queue[down].key):
            break
        queue[at].time = queue[down].time
        queue[at].key = queue[down].key
        at = down
    queue[at].time = time
    queue[at].key = key
    return size


@compiled
def put(p: Problem, s: State, i: int, row: int, devices: Ints) -> None:
    """Place operator i: its parts' devices and seconds, and the load of these devices."""
    M = p.parts
    forward, backward = i * M, (2 * p.n - 1 - i) * M
    s.row[i] = row
    first = p.seconds_first[row]
    for k in range(p.row_parts[row]):
        d = devices[k]
        s.task[forward + k].place = d
        s.task[backward + k].place = d
        s.task[forward + k].span = p.seconds[p.device_kind[d], first + k, 0]
        s.task[backward + k].span = p.seconds[p.device_kind[d], first + k, 1]
        s.device[d].load += s.task[forward + k].span + s.task[backward + k].span


@compiled
def build(p: Problem, s: State, rows: Ints, devices: Ints) -> bool:
    """The task graph of a strategy from nothing. False if there is no room for all messages."""
    s.top[0] = 0
    for d in range(p.devices):
        s.device[d].load = 0.0
    for t in range(2 * p.n * p.parts):
        s.task[t].waits = 0
    s.cover[:] = 0
    s.held[:] = 0
    s.link_load[:] = 0
    for i in range(p.n):
        put(p, s, i, rows[i], devices[i])
        if p.group[i] >= 0:
            hold(p, s, i, 1)
    for e in range(len(p.source)):
        if s.top[0] + 2 * p.row_parts[s.row[p.source[e]]] * p.row_parts[s.row[p.target[e]]] > len(s.message):
            return False
        join(p, s, e)
        count_waits(p, s, e, 1)
    for g in range(p.groups):
        exchange(p, s, g)
    return True


@compiled
def room(p: Problem, s: State, i: int, row: int) -> int:
    """The most messages that the edges of operator i can have with these degrees."""
    found = 0
    for x in range(p.out_first[i], p.out_first[i + 1]):
        found += p.row_parts[s.row[p.target[p.out_edges[x]]]]
    for x in range(p.in_first[i], p.in_first[i + 1]):
        found += p.row_parts[s.row[p.source[p.in_edges[x]]]]
    return 2 * found * int(p.row_parts[row])


@compiled
def change(p: Problem, s: State, i: int, row: int, devices: Ints) -> float:
    """Place operator i otherwise, and remember how it was. Returns the time of the first event that this touches."""
    M = p.parts
    forward, backward = i * M, (2 * p.n - 1 - i) * M
    touched = np.inf
    for d in range(p.devices):
        s.device[d].load_ = s.device[d].load
    s.link_load_[:] = s.link_load
    at = 0
    for x in range(p.out_first[i], p.out_first[i + 1]):
        e = p.out_edges[x]
        s.old_forward[at] = s.forward_rows[e]
        s.old_backward[at] = s.backward_rows[e]
        count_waits(p, s, e, -1)
        at += 1
    for x in range(p.in_first[i], p.in_first[i + 1]):
        e = p.in_edges[x]
        s.old_forward[at] = s.forward_rows[e]
        s.old_backward[at] = s.backward_rows[e]
        count_waits(p, s, e, -1)
        at += 1
        touched = min(touched, s.extent[0, p.source[e]].first_end)
    if p.group[i] >= 0:
        hold(p, s, i, -1)
    for k in range(p.row_parts[s.row[i]]):
        d = s.task[forward + k].place
        s.device[d].load -= s.task[forward + k].span + s.task[backward + k].span
        if s.task[forward + k].ready < touched:
            touched = s.task[forward + k].ready
    for k in range(M):
        s.old_place[k] = s.task[forward + k].place
        s.old_span[k] = s.task[forward + k].span
        s.old_span[M + k] = s.task[backward + k].span
    put(p, s, i, row, devices)
    _rejoin(p, s, i)
    for k in range(p.row_parts[row]):
        if s.task[forward + k].waits == 0:
            touched = 0.0
    return touched


@compiled
def _rejoin(p: Problem, s: State, i: int) -> None:
    for x in range(p.out_first[i], p.out_first[i + 1]):
        join(p, s, p.out_edges[x])
        count_waits(p, s, p.out_edges[x], 1)
    for x in range(p.in_first[i], p.in_first[i + 1]):
        join(p, s, p.in_edges[x])
        count_waits(p, s, p.in_edges[x], 1)
    if p.group[i] >= 0:
        hold(p, s, i, 1)
        exchange(p, s, p.group[i])


@compiled
def take_back(p: Problem, s: State, i: int, row: int, top: int) -> None:
    """Undo the last change of operator i, which had this row, when rows ended at `top`."""
    M = p.parts
    forward, backward = i * M, (2 * p.n - 1 - i) * M
    for x in range(p.out_first[i], p.out_first[i + 1]):
        count_waits(p, s, p.out_edges[x], -1)
    for x in range(p.in_first[i], p.in_first[i + 1]):
        count_waits(p, s, p.in_edges[x], -1)
    if p.group[i] >= 0:
        hold(p, s, i, -1)
    s.row[i] = row
    for k in range(M):
        s.task[forward + k].place = s.old_place[k]
        s.task[backward + k].place = s.old_place[k]
        s.task[forward + k].span = s.old_span[k]
        s.task[backward + k].span = s.old_span[M + k]
    at = 0
    for x in range(p.out_first[i], p.out_first[i + 1]):
        s.forward_rows[p.out_edges[x]] = s.old_forward[at]
        s.backward_rows[p.out_edges[x]] = s.old_backward[at]
        count_waits(p, s, p.out_edges[x], 1)
        at += 1
    for x in range(p.in_first[i], p.in_first[i + 1]):
        s.forward_rows[p.in_edges[x]] = s.old_forward[at]
        s.backward_rows[p.in_edges[x]] = s.old_backward[at]
        count_waits(p, s, p.in_edges[x], 1)
        at += 1
    if p.group[i] >= 0:
        hold(p, s, i, 1)
        exchange(p, s, p.group[i])
    for d in range(p.devices):
        s.device[d].load = s.device[d].load_
    s.link_load[:] = s.link_load_
    s.top[0] = top


@compiled
def arrive(arrival: Records, queue: Records, size: int, slot: int, time: float) -> int:
    """Something that a task waits for is there; the task is ready with the last."""
    arrival[slot].pending -= 1
    if time > arrival[slot].latest:
        arrival[slot].latest = time
    if arrival[slot].pending == 0:
        size = push(queue, size, arrival[slot].latest, 2 * slot)
    return size


@compiled
def restart(p: Problem, s: State, changed: int, since: float) -> int:
    """The state before the first event at or after `since`, from the times at hand. Returns the size of the queue."""
    n, M = p.n, p.parts
    task, arrival, device, queue, extent = s.task, s.arrival, s.device, s.queue, s.extent
    slots = 2 * n * M
    for d in range(p.devices):
        device[d].left = device[d].load
        device[d].free = 0.0
    s.link_free[:] = 0
    size = 0
    for way in range(2):
        for i in range(n):
            base = i * M if way == 0 else (2 * n - 1 - i) * M
            parts = p.row_parts[s.row[i]]
            if i != changed and extent[way, i].last_end < since:
                for t in range(base, base + parts):
                    device[task[t].place].left -= task[t].span
                continue
            for t in range(base, base + parts):
                if i != changed and task[t].ready < since:
                    d = task[t].place
                    device[d].left -= task[t].span
                    device[d].free = max(device[d].free, task[t].end)
                    task[t].ready_, task[t].start_, task[t].end_ = task[t].ready, task[t].start, task[t].end
                    if task[t].end >= since:
                        size = push(queue, size, task[t].end, 2 * t + 1)
                    continue
                arrival[t].pending = task[t].waits
                arrival[t].latest = 0
                if task[t].waits == 0:
                    if way == 0:
                        size = push(queue, size, 0.0, 2 * t)
                    else:
                        arrival[t].pending = 1
    for g in range(p.groups):
        arrival[slots + g].pending = 0
        arrival[slots + g].latest = 0
        for x in range(p.group_first[g], p.group_first[g + 1]):
            arrival[slots + g].pending += p.row_parts[s.row[p.group_members[x]]]
    for e in range(len(p.source)):
        i, j = p.source[e], p.target[e]
        if i == changed or j == changed:
            continue
        if extent[0, i].first_end < since and extent[0, j].last_ready >= since:
            for k in range(p.row_parts[s.row[i]]):
                if task[i * M + k].end < since:
                    size = _arrived(
                        s.message,
                        task,
                        arrival,
                        queue,
                        s.link_free,
                        size,
                        s.forward_rows[e],
                        k,
                        task[i * M + k].end,
                        j * M,
                        since,
                    )
        if extent[1, j].first_end < since and extent[1, i].last_ready >= since:
            for k in range(p.row_parts[s.row[j]]):
                t = (2 * n - 1 - j) * M + k
                if task[t].end < since:
                    size = _arrived(
                        s.message,
                        task,
                        arrival,
                        queue,
                        s.link_free,
                        size,
                        s.backward_rows[e],
                        k,
                        task[t].end,
                        (2 * n - 1 - i) * M,
                        since,
                    )
    for i in range(n):
        if i == changed:
            continue
        base = (2 * n - 1 - i) * M
        if extent[0, i].first_end < since and extent[1, i].last_ready >= since:
            for k in range(p.row_parts[s.row[i]]):
                if task[base + k].waits == 0 and task[i * M + k].end < since and task[base + k].ready >= since:
                    size = arrive(arrival, queue, size, base + k, task[i * M + k].end)
        g = p.group[i]
        if g >= 0 and extent[1, i].first_end < since and task[slots + g].end >= since:
            for t in range(base, base + p.row_parts[s.row[i]]):
                if task[t].end < since:
                    arrival[slots + g].pending -= 1
                    arrival[slots + g].latest = max(arrival[slots + g].latest, task[t].end)
    for g in range(p.groups):
        if task[slots + g].end < since:
            for d in range(p.devices):
                if s.sync[g, d].lasts > 0:
                    w = s.sync[g, d].wire
                    s.link_free[w] = max(s.link_free[w], s.sync[g, d].begin + s.sync[g, d].lasts)
    return size


@compiled
def _arrived(
    message: Records,
    task: Records,
    arrival: Records,
    queue: Records,
    link_free: Floats,
    size: int,
    rows: Ints,
    k: int,
    finish: float,
    base: int,
    since: float,
) -> int:
    """What a part sent that finished before `since`: who still waits, and which links are still busy."""
    for x in range(rows[k], rows[k + 1]):
        w, t, time = message[x].wire, base + message[x].peer, finish
        if w >= 0:
            time = message[x].begin + message[x].lasts
            link_free[w] = max(link_free[w], time)
        if task[t].ready >= since:
            size = arrive(arrival, queue, size, t, time)
    return size


@compiled
def send(
    message: Records,
    arrival: Records,
    queue: Records,
    link_free: Floats,
    size: int,
    rows: Ints,
    k: int,
    finish: float,
    base: int,
) -> int:
    """Part k has finished: all that it sends along an edge takes its turn on the links."""
    for x in range(rows[k], rows[k + 1]):
        w, time = message[x].wire, finish
        if w >= 0:
            time = max(finish, link_free[w])
            message[x].begin_ = time
            time += message[x].lasts
            link_free[w] = time
        size = arrive(arrival, queue, size, base + message[x].peer, time)
    return size


@compiled
def run(p: Problem, s: State, size: int, limit: float) -> float:
    """Simulate to the end. Returns the seconds of the strategy, or infinity once they are seen to be above `limit`."""
    n, M = p.n, p.parts
    task, arrival, message, device = s.task, s.arrival, s.message, s.device
    queue, sync, link_free = s.queue, s.sync, s.link_free
    half, slots = n * M, 2 * n * M
    most = 0.0
    limit *= MARGIN
    for d in range(p.devices):
        if device[d].free + device[d].left > limit:
            return np.inf
    for w in range(p.links):
        if s.link_load[w] > limit:
            return np.inf
    while size > 0:
        time, key = queue[0].time, queue[0].key
        size = pop(queue, size)
        t = key >> 1
        if key & 1 == 0:
            task[t].ready_ = time
            if t < slots:
                d = task[t].place
                begin = max(time, device[d].free)
                time = begin + task[t].span
                device[d].free = time
                device[d].left -= task[t].span
                task[t].start_ = begin
                if time + device[d].left > limit:
                    return np.inf
            else:
                task[t].start_ = time
            task[t].end_ = time
            size = push(queue, size, time, key + 1)
        elif t < half:
            i, k = t // M, t % M
            most = max(most, time)
            for x in range(p.out_first[i], p.out_first[i + 1]):
                e = p.out_edges[x]
                size = send(message, arrival, queue, link_free, size, s.forward_rows[e], k, time, p.target[e] * M)
            backward = (2 * n - 1 - i) * M + k
            if task[backward].waits == 0:
                size = arrive(arrival, queue, size, backward, time)
        elif t < slots:
            i, k = 2 * n - 1 - t // M, t % M
            most = max(most, time)
            for x in range(p.in_first[i], p.in_first[i + 1]):
                e = p.in_edges[x]
                size = send(
                    message, arrival, queue, link_free, size, s.backward_rows[e], k, time, (2 * n - 1 - p.source[e]) * M
                )
            if p.group[i] >= 0:
                size = arrive(arrival, queue, size, slots + p.group[i], time)
        else:
            g = t - slots
            for d in range(p.devices):
                if sync[g, d].lasts > 0:
                    w = sync[g, d].wire
                    begin = max(time, link_free[w])
                    sync[g, d].begin_ = begin
                    link_free[w] = begin + sync[g, d].lasts
                    most = max(most, link_free[w])
    for w in range(p.links):
        most = max(most, link_free[w])
    return most if most <= limit else np.inf


@compiled
def keep(p: Problem, s: State, changed: int, since: float, cost: float) -> None:
    """The times of the last run are the times at hand."""
    n, M = p.n, p.parts
    slots = 2 * n * M
    for way in range(2):
        for i in range(n):
            if i != changed and s.extent[way, i].last_end < since:
                continue
            base = i * M if way == 0 else (2 * n - 1 - i) * M
            parts = p.row_parts[s.row[i]]
            s.extent[way, i].first_ready, s.extent[way, i].first_end = np.inf, np.inf
            s.extent[way, i].last_ready, s.extent[way, i].last_end = 0.0, 0.0
            for t in range(base, base + parts):
                s.task[t].ready, s.task[t].start, s.task[t].end = s.task[t].ready_, s.task[t].start_, s.task[t].end_
                s.extent[way, i].first_ready = min(s.extent[way, i].first_ready, s.task[t].ready)
                s.extent[way, i].last_ready = max(s.extent[way, i].last_ready, s.task[t].ready)
                s.extent[way, i].first_end = min(s.extent[way, i].first_end, s.task[t].end)
                s.extent[way, i].last_end = max(s.extent[way, i].last_end, s.task[t].end)
                if s.task[t].end >= since:
                    _keep_sent(p, s, way, i, t - base)
    for g in range(p.groups):
        t = slots + g
        if s.task[t].end >= since or (changed >= 0 and p.group[changed] == g):
            s.task[t].ready, s.task[t].start, s.task[t].end = s.task[t].ready_, s.task[t].start_, s.task[t].end_
            for d in range(p.devices):
                s.sync[g, d].begin = s.sync[g, d].begin_
    s.cost[0] = cost


@compiled
def _keep_sent(p: Problem, s: State, way: int, i: int, k: int) -> None:
    if way == 0:
        for x in range(p.out_first[i], p.out_first[i + 1]):
            rows = s.forward_rows[p.out_edges[x]]
            for y in range(rows[k], rows[k + 1]):
                s.message[y].begin = s.message[y].begin_
    else:
        for x in range(p.in_first[i], p.in_first[i + 1]):
            rows = s.backward_rows[p.in_edges[x]]
            for y in range(rows[k], rows[k + 1]):
                s.message[y].begin = s.message[y].begin_


@compiled
def simulate_all(p: Problem, s: State) -> float:
    """Simulate the task graph that has been built from its beginning, and keep the times."""
    for way in range(2):
        for i in range(p.n):
            s.extent[way, i].first_end = 0.0
            s.extent[way, i].last_ready = 0.0
            s.extent[way, i].last_end = 0.0
    for t in range(len(s.task)):
        s.task[t].ready = 0.0
        s.task[t].end = 0.0
    size = restart(p, s, -1, 0.0)
    cost = run(p, s, size, np.inf)
    keep(p, s, -1, 0.0, cost)
    return cost


@compiled
def compact(p: Problem, s: State) -> None:
    """Move all rows in use to the front."""
    old = s.message[: s.top[0]].copy()
    top = 0
    for e in range(len(p.source)):
        for rows in (s.backward_rows[e], s.forward_rows[e]):
            first, after = rows[0], rows[p.parts]
            for x in range(after - first):
                s.message[top + x] = old[first + x]
            rows[:] += top - first
            top += after - first
    s.top[0] = top
