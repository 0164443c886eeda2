"""Compiled: the state of the simulation just before the first event that a change can touch, from the kept times.

Tasks that were ready before keep their times; their ends are events if they are still to come. For all other tasks it
is counted what they still wait for: messages that arrived before have arrived. Each device and each link is busy until
the last task that began on it before has ended. Operators whose tasks all lie on one side are skipped.
"""

from __future__ import annotations

from .edge_messages import gradient_slots, has_sums, holders
from .event_queue import arrive, push
from .flat_arrays import Problem, State
from .numba_compiler import compiled


@compiled
def restart(p: Problem, s: State, changed: int, since: float) -> int:
    """Set the state before the first event at or after `since`, if operator `changed` was changed (-1: none). Returns
    the size of the queue."""
    for d in range(p.devices):
        s.device[d].left = s.device[d].load
        s.device[d].free = 0.0
    s.link_free.fill(0)
    size = _computations(p, s, changed, since)
    size = _sums(p, s, changed, since, size)
    size = _messages(p, s, changed, since, size)
    size = _turns(p, s, changed, since, size)
    _gatherings(p, s, changed, since)
    return size


@compiled
def _computations(p: Problem, s: State, changed: int, since: float) -> int:
    """The parts of all operators: how many messages they wait for in all, and the ends that are still to come."""
    task, arrival, device, extent, size = s.task, s.arrival, s.device, s.extent, 0
    for at in range(2 * p.n):
        way, i = (0, at) if at < p.n else (1, 2 * p.n - 1 - at)
        base = (2 * at if way == 0 else 2 * at + 1) * p.parts
        after = base + p.row_parts[s.row[i]]
        if i != changed and extent[way, i].last_end < since:
            for t in range(base, after):
                device[task[t].place].left -= task[t].span
            continue
        for t in range(base, after):
            if i != changed and task[t].ready < since:
                d = task[t].place
                device[d].left -= task[t].span
                device[d].free = max(device[d].free, task[t].end)
                task[t].ready_, task[t].start_, task[t].end_ = task[t].ready, task[t].start, task[t].end
                if task[t].end >= since:
                    size = push(s.queue, size, task[t].end, 2 * t + 1)
                continue
            arrival[t].pending = task[t].waits
            arrival[t].latest = 0
            if task[t].waits == 0:
                if way == 0:
                    size = push(s.queue, size, 0.0, 2 * t)
                else:
                    arrival[t].pending = 1  # its own forward
    return size


@compiled
def _sums(p: Problem, s: State, changed: int, since: float, size: int) -> int:
    """The sums of regions: how many summands they wait for, what devices pass on, and the ends still to come."""
    task, arrival, extent = s.task, s.arrival, s.extent
    for at in range(2 * p.n):
        way, i = (0, at) if at < p.n else (1, 2 * p.n - 1 - at)
        each = holders(p, s, i)
        if each == 1 or (way == 0 and not has_sums(p, s, i)) or (i != changed and extent[way, i].last_end < since):
            continue
        first, parts = (
            ((2 * at + 1) * p.parts, 2 * at * p.parts) if way == 0 else (2 * at * p.parts, (2 * at + 1) * p.parts)
        )
        for r in range(p.row_parts[s.row[i]] // each):
            t, members = first + r, range(parts + r * each, parts + (r + 1) * each)
            if way == 1 and task[t].waits == 0:
                continue
            if i != changed and task[t].ready < since:
                task[t].ready_, task[t].start_, task[t].end_ = task[t].ready, task[t].start, task[t].end
                for x in range(r * each, (r + 1) * each):
                    one = s.ring[way * p.n + i, x]
                    if one.lasts > 0:
                        s.link_free[one.wire] = max(s.link_free[one.wire], one.begin + one.lasts)
                if task[t].end >= since:
                    size = push(s.queue, size, task[t].end, 2 * t + 1)
                elif way == 1:
                    for m in members:
                        if task[m].ready >= since:
                            size = arrive(arrival, s.queue, size, m, task[t].end)
                continue
            arrival[t].pending = each if way == 0 else task[t].waits
            arrival[t].latest = 0
            if way == 0 and i != changed:
                for m in members:
                    if task[m].end < since:
                        size = arrive(arrival, s.queue, size, t, task[m].end)
    return size


@compiled
def _given(p: Problem, s: State, i: int, k: int) -> float:
    """When part k of operator i had its region."""
    if has_sums(p, s, i):
        return float(s.task[(2 * i + 1) * p.parts + k // holders(p, s, i)].end)
    return float(s.task[2 * i * p.parts + k].end)


@compiled
def _messages(p: Problem, s: State, changed: int, since: float, size: int) -> int:
    """Messages sent before `since`: count them as arrived, and the links as busy until then."""
    task, message, arrival, queue, extent, link_free = s.task, s.message, s.arrival, s.queue, s.extent, s.link_free
    for e in range(len(p.source)):
        if p.source[e] == changed or p.target[e] == changed:
            continue
        for way in range(2):
            i, j = (p.source[e], p.target[e]) if way == 0 else (p.target[e], p.source[e])
            if extent[way, i].first_end >= since or extent[way, j].last_ready < since:
                continue
            rows = s.forward_rows[e] if way == 0 else s.backward_rows[e]
            to, each = (2 * j * p.parts, 1) if way == 0 else gradient_slots(p, s, e)
            for k in range(p.row_parts[s.row[i]]):
                finish = _given(p, s, i, k) if way == 0 else task[(4 * p.n - 2 * i - 1) * p.parts + k].end
                if finish >= since:
                    continue
                for x in range(rows[k], rows[k + 1]):
                    w, t, time = message[x].wire, to + message[x].peer // each, finish
                    if w >= 0:
                        time = message[x].begin + message[x].lasts
                        link_free[w] = max(link_free[w], time)
                    if task[t].ready >= since:
                        size = arrive(arrival, queue, size, t, time)
    return size


@compiled
def _turns(p: Problem, s: State, changed: int, since: float, size: int) -> int:
    """Backward tasks that wait for nothing but their own forward, where that was done before `since`."""
    for i in range(p.n):
        if i != changed and s.extent[0, i].first_end < since and s.extent[1, i].last_ready >= since:
            backward = (4 * p.n - 2 * i - 1) * p.parts
            for k in range(p.row_parts[s.row[i]]):
                t, end = backward + k, _given(p, s, i, k)
                if s.task[t].waits == 0 and end < since and s.task[t].ready >= since:
                    size = arrive(s.arrival, s.queue, size, t, end)
    return size


@compiled
def _gatherings(p: Problem, s: State, changed: int, since: float) -> None:
    """What the gathering of each group still waits for, and the links that are busy with what was sent after it."""
    task, sync, link_free = s.task, s.sync, s.link_free
    for g in range(p.groups):
        t = 4 * p.n * p.parts + g
        if task[t].end < since:
            for d in range(p.devices):
                if sync[g, d].lasts > 0:
                    w = sync[g, d].wire
                    link_free[w] = max(link_free[w], sync[g, d].begin + sync[g, d].lasts)
            continue
        pending, latest = 0, 0.0
        for x in range(p.group_first[g], p.group_first[g + 1]):
            i = p.group_members[x]
            backward, parts = (4 * p.n - 2 * i - 1) * p.parts, p.row_parts[s.row[i]]
            pending += parts
            if i != changed and s.extent[1, i].first_end < since:
                for k in range(parts):
                    if task[backward + k].end < since:
                        pending -= 1
                        latest = max(latest, task[backward + k].end)
        s.arrival[t].pending = pending
        s.arrival[t].latest = latest
