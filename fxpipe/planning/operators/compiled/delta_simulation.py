"""Compiled: the time of a strategy that differs from the last one in one operator (the SOAP paper's algorithm 2).

    change     new rows for the edges of the operator; all others stay as they are
    restart    the state of the simulation just before the first event that the change can touch, from the kept times
    run        the rest of the simulation
    keep       the new times are kept; or `take_back`: the old rows are restored

The paper propagates changes from task to task until nothing changes any more. In a training step most of what comes
after a change moves a little, so simulating everything from the first change on touches hardly more tasks, and each
only once. Everything earlier is left alone, and the task graph is never rebuilt.

Only computations and sums of regions are events. Messages queue for a link in the order in which their senders finish,
so all messages of a task are sent when it finishes, in the order of their keys; what is passed on for a sum is sent
when all of its summands are there. Events of one time come in the order of their slots. Slots are keys: no task has a
smaller one than what it waits for. So each device and each link runs its tasks in the order of (ready, key), exactly as
in `simulate_strategy.run`.

A strategy is given up as soon as it is sure to take longer than `limit`: before anything is changed, if a device would
have more seconds of work; before the simulation, if a link has; during the simulation, if a device would end too late
even without waiting. `MARGIN` makes sure that rounding gives up no strategy within the limit.
"""

from __future__ import annotations

import numpy as np

from .edge_messages import gradient_slots, has_sums, holders
from .event_queue import arrive, pop, push
from .flat_arrays import Floats, Ints, Problem, Records, State
from .graph_update import change, excess, is_jam, is_overload, take_back
from .numba_compiler import compiled
from .restart_state import restart

MARGIN = 1 + 1e-9


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
    each: int,
) -> int:
    """Put all that part k sends along an edge on the links, when the part has finished at `finish`. What is for part m
    arrives in slot base + m // each. Returns the size of the queue."""
    for x in range(rows[k], rows[k + 1]):
        w, time = message[x].wire, finish
        if w >= 0:
            time = max(finish, link_free[w])
            message[x].begin_ = time
            time += message[x].lasts
            link_free[w] = time
        size = arrive(arrival, queue, size, base + message[x].peer // each, time)
    return size


@compiled
def send_forward(p: Problem, s: State, size: int, i: int, k: int, finish: float) -> int:
    """Part k of operator i has its region: send it to all that read it. Returns the size of the queue."""
    for x in range(p.out_first[i], p.out_first[i + 1]):
        e = p.out_edges[x]
        base = 2 * p.target[e] * p.parts
        size = send(s.message, s.arrival, s.queue, s.link_free, size, s.forward_rows[e], k, finish, base, 1)
    backward = (4 * p.n - 2 * i - 1) * p.parts + k
    if s.task[backward].waits == 0:
        size = arrive(s.arrival, s.queue, size, backward, finish)
    return size


@compiled
def add_up(p: Problem, s: State, t: int, time: float) -> float:
    """All summands of the sum in slot t are there: the devices pass on what they do. Returns when it has ended."""
    at = t // p.parts
    line, i = (at // 2, at // 2) if at < 2 * p.n else (2 * p.n - 1 - (at // 2 - p.n), 2 * p.n - 1 - at // 2)
    each, end = holders(p, s, i), time
    first = t % p.parts * each
    for x in range(first, first + each):
        if s.ring[line, x].lasts > 0:
            w = s.ring[line, x].wire
            begin = max(time, s.link_free[w])
            s.ring[line, x].begin_ = begin
            s.link_free[w] = begin + s.ring[line, x].lasts
            end = max(end, s.link_free[w])
    return end


@compiled
def attempt(p: Problem, s: State, i: int, row: int, devices: Ints, limit: float) -> bool:
    """Give operator i the row `row` on `devices`, and keep that if the step then takes no longer than `limit` seconds;
    returns whether it does."""
    if is_overload(p, s, i, row, devices, limit * MARGIN):
        return False
    top, old = s.top[0], s.row[i]
    since = change(p, s, i, row, devices)
    cost, more = np.inf, excess(p, s)
    if not is_jam(p, s, (limit - more) * MARGIN):
        for _ in range(p.simulations):
            cost = run(p, s, restart(p, s, i, since), limit - more) + more
    if cost <= limit:
        keep(p, s, i, since, cost)
        return True
    take_back(p, s, i, old, top)
    return False


@compiled
def run(p: Problem, s: State, size: int, limit: float) -> float:
    """Simulate the last micro-batch to the end, from a queue of `size` events. Returns the seconds of the step, inf if
    above `limit`: each micro-batch before takes as long as the last one's computations."""
    n, M = p.n, p.parts
    task, arrival, message, device = s.task, s.arrival, s.message, s.device
    queue, sync, link_free = s.queue, s.sync, s.link_free
    half, slots = 2 * n * M, 4 * n * M
    work = most = 0.0  # when the last computation has ended, and the last exchange of gradients
    limit *= MARGIN
    each_limit = limit / p.micro_batches
    for d in range(p.devices):
        if device[d].free + device[d].left > each_limit:
            return np.inf
    while size > 0:
        time, key = queue[0].time, queue[0].key
        size = pop(queue, size)
        t = key >> 1
        if key & 1 == 0:
            task[t].ready_ = time
            if t < slots and (t // M & 1 == 1) == (t < half):
                task[t].start_ = time
                time = add_up(p, s, t, time)
                work = max(work, time)
            elif t < slots:
                d = task[t].place
                begin = max(time, device[d].free)
                time = begin + task[t].span
                device[d].free = time
                device[d].left -= task[t].span
                task[t].start_ = begin
                if time + device[d].left > each_limit:
                    return np.inf
            else:
                task[t].start_ = time
            task[t].end_ = time
            size = push(queue, size, time, key + 1)
        elif t < half:
            i, k = t // M // 2, t % M
            work = max(work, time)
            each = holders(p, s, i)
            if t // M & 1 == 1:
                for x in range(k * each, (k + 1) * each):
                    size = send_forward(p, s, size, i, x, time)
            elif has_sums(p, s, i):
                size = arrive(arrival, queue, size, t - k + M + k // each, time)
            else:
                size = send_forward(p, s, size, i, k, time)
        elif t < slots and t // M & 1 == 0:
            each = holders(p, s, 2 * n - 1 - t // M // 2)
            first = t - t % M + M + t % M * each
            for x in range(first, first + each):
                size = arrive(arrival, queue, size, x, time)
        elif t < slots:
            i, k = 2 * n - 1 - t // M // 2, t % M
            work = max(work, time)
            for x in range(p.in_first[i], p.in_first[i + 1]):
                e = p.in_edges[x]
                base, each = gradient_slots(p, s, e)
                size = send(message, arrival, queue, link_free, size, s.backward_rows[e], k, time, base, each)
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
    cost = max(work, most) + (p.micro_batches - 1) * work
    return cost if cost <= limit else np.inf


@compiled
def keep(p: Problem, s: State, changed: int, since: float, cost: float) -> None:
    """Keep the times of the last run, which restarted at `since` with operator `changed` changed (-1: none)."""
    n, M = p.n, p.parts
    slots = 4 * n * M
    for way in range(2):
        for i in range(n):
            if i != changed and s.extent[way, i].last_end < since:
                continue
            base = 2 * i * M if way == 0 else (4 * n - 2 * i - 1) * M
            parts = p.row_parts[s.row[i]]
            s.extent[way, i].first_ready, s.extent[way, i].first_end = np.inf, np.inf
            s.extent[way, i].last_ready, s.extent[way, i].last_end = 0.0, 0.0
            for t in range(base, base + parts):
                s.task[t].ready, s.task[t].start, s.task[t].end = s.task[t].ready_, s.task[t].start_, s.task[t].end_
                s.extent[way, i].first_ready = min(s.extent[way, i].first_ready, s.task[t].ready)
                s.extent[way, i].last_ready = max(s.extent[way, i].last_ready, s.task[t].ready)
                s.extent[way, i].first_end = min(s.extent[way, i].first_end, s.task[t].end)
                s.extent[way, i].last_end = max(s.extent[way, i].last_end, s.task[t].end)
                if s.task[t].end >= since and not (way == 0 and has_sums(p, s, i)):
                    _keep_sent(p, s, way, i, t - base)
            _keep_sums(p, s, way, i, since)
    for g in range(p.groups):
        t = slots + g
        if s.task[t].end >= since or (changed >= 0 and p.group[changed] == g):
            s.task[t].ready, s.task[t].start, s.task[t].end = s.task[t].ready_, s.task[t].start_, s.task[t].end_
            for d in range(p.devices):
                s.sync[g, d].begin = s.sync[g, d].begin_
    s.cost[0] = cost


@compiled
def _keep_sums(p: Problem, s: State, way: int, i: int, since: float) -> None:
    """Keep the times of the sums of operator i's regions. One that adds nothing up is never ready."""
    each, task = holders(p, s, i), s.task
    first = (2 * i + 1) * p.parts if way == 0 else (4 * p.n - 2 * i - 2) * p.parts
    for r in range(p.row_parts[s.row[i]] // each):
        t = first + r
        if each == 1 or (way == 0 and not has_sums(p, s, i)) or (way == 1 and task[t].waits == 0):
            task[t].ready = task[t].start = task[t].end = np.inf
            continue
        task[t].ready, task[t].start, task[t].end = task[t].ready_, task[t].start_, task[t].end_
        if task[t].ready >= since:
            for x in range(r * each, (r + 1) * each):
                s.ring[way * p.n + i, x].begin = s.ring[way * p.n + i, x].begin_
        if way == 0:
            s.extent[0, i].last_end = max(s.extent[0, i].last_end, task[t].end)
            if task[t].end >= since:
                for k in range(r * each, (r + 1) * each):
                    _keep_sent(p, s, way, i, k)


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
    """Simulate the task graph from its beginning, and keep the times. Returns the seconds of the step."""
    for way in range(2):
        for i in range(p.n):
            s.extent[way, i].first_end = 0.0
            s.extent[way, i].last_ready = 0.0
            s.extent[way, i].last_end = 0.0
    for t in range(len(s.task)):
        s.task[t].ready = 0.0
        s.task[t].end = 0.0
    size = restart(p, s, -1, 0.0)
    cost = run(p, s, size, np.inf) + excess(p, s)
    keep(p, s, -1, 0.0, cost)
    return cost
