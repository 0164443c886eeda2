"""Compiled: builds the task graph of a strategy (`build`), or changes one operator (`change`): its edges get new rows,
and all others stay as they are. `take_back` restores the old rows."""

from __future__ import annotations

import numpy as np

from .edge_messages import count_waits, exchange, hold, holders, join, keep_bytes, pass_on, unload
from .flat_arrays import Floats, Ints, Problem, State
from .numba_compiler import compiled


@compiled
def copy(to: Ints | Floats, of: Ints | Floats) -> None:
    for x in range(len(to)):
        to[x] = of[x]


@compiled
def put(p: Problem, s: State, i: int, row: int, devices: Ints) -> None:
    """Place operator i: set its parts' devices and seconds, and add to the load of these devices."""
    M = p.parts
    forward, backward = 2 * i * M, (4 * p.n - 2 * i - 1) * M
    s.row[i] = row
    first = p.seconds_first[row]
    for k in range(p.row_parts[row]):
        d = devices[k]
        s.task[forward + k].place = d
        s.task[backward + k].place = d
        s.task[forward + k].span = p.seconds[p.device_kind[d], first + k, 0]
        s.task[backward + k].span = p.seconds[p.device_kind[d], first + k, 1]
        s.device[d].load += s.task[forward + k].span + s.task[backward + k].span
        keep_bytes(p, s, i, d, p.kept[first + k])
        if p.again_group[i] >= 0:
            s.again[d, p.again_group[i]] += p.dropped[first + k]
    pass_on(p, s, i)


@compiled
def forget(p: Problem, s: State, i: int, k: int) -> None:
    """Take the bytes of part k of operator i off its device."""
    d, at = s.task[2 * i * p.parts + k].place, p.seconds_first[s.row[i]] + k
    keep_bytes(p, s, i, d, -p.kept[at])
    if p.again_group[i] >= 0:
        s.again[d, p.again_group[i]] -= p.dropped[at]


@compiled
def build(p: Problem, s: State, rows: Ints, devices: Ints) -> bool:
    """Build the task graph of a strategy. False if there is no room for all messages."""
    s.top[0] = 0
    for d in range(p.devices):
        s.device[d].load = 0.0
        s.device[d].held = 0.0
        s.again[d].fill(0.0)
        s.since[d].fill(0.0)
    for t in range(4 * p.n * p.parts):
        s.task[t].waits = 0
    s.cover.fill(0)
    s.held.fill(0)
    s.summands.fill(0)
    s.link_load.fill(0)
    for i in range(p.n):
        put(p, s, i, rows[i], devices[i])
        if p.group[i] >= 0:
            hold(p, s, i, 1)
    if not join(p, s, p.out_edges):
        return False
    count_waits(p, s, p.out_edges, 1)
    for g in range(p.groups):
        exchange(p, s, g)
    return True


@compiled
def room(p: Problem, s: State, i: int, row: int) -> int:
    """The most messages that the edges of operator i can have with these degrees."""
    found = 0
    for x in range(p.around_first[i], p.around_first[i + 1]):
        e = p.around_edges[x]
        found += p.row_parts[s.row[p.target[e] if p.source[e] == i else p.source[e]]]
    return 2 * found * int(p.row_parts[row])


@compiled
def compact(p: Problem, s: State) -> None:
    """Move all rows in use to the front, edge by edge in the order of their places."""
    top, last, last_edge = 0, -1, -1
    for _ in range(len(p.source)):
        edge, first = -1, -1
        for e in range(len(p.source)):
            begin = s.backward_rows[e, 0]
            if (begin > last or (begin == last and e > last_edge)) and (edge < 0 or begin < first):
                edge, first = e, begin
        last, last_edge = first, edge
        count = s.forward_rows[edge, p.parts] - first
        for x in range(count):
            s.message[top + x] = s.message[first + x]
        for k in range(p.parts + 1):
            s.backward_rows[edge, k] += top - first
            s.forward_rows[edge, k] += top - first
        top += count
    s.top[0] = top


@compiled
def is_overload(p: Problem, s: State, i: int, row: int, devices: Ints, limit: float) -> bool:
    """Whether a device would have more than `limit` seconds of work, in all micro-batches, if operator i were placed
    like this."""
    M, device, task = p.parts, s.device, s.task
    for d in range(p.devices):
        device[d].left = device[d].load
    for k in range(p.row_parts[s.row[i]]):
        forward, backward = 2 * i * M + k, (4 * p.n - 2 * i - 1) * M + k
        device[task[forward].place].left -= task[forward].span + task[backward].span
    for k in range(p.row_parts[row]):
        d, at = devices[k], p.seconds_first[row] + k
        device[d].left += p.seconds[p.device_kind[d], at, 0] + p.seconds[p.device_kind[d], at, 1]
    most = 0.0
    for d in range(p.devices):
        most = max(most, device[d].left)
    return most * p.micro_batches > limit


@compiled
def is_jam(p: Problem, s: State, limit: float) -> bool:
    """Whether a link has more than `limit` seconds of messages."""
    most = 0.0
    for w in range(p.links):
        most = max(most, s.link_load[w])
    return most > limit


@compiled
def excess(p: Problem, s: State) -> float:
    """The seconds that count, beside those of the step, for a strategy that does not fit in memory: more than any that
    fits takes, and more the more memory it lacks. 0 if it fits."""
    lacks = 0.0
    for d in range(p.devices):
        most, after = 0.0, 0.0
        for r in range(s.again.shape[1] - 2, -1, -1):
            after += s.since[d, r + 1]
            most = max(most, s.again[d, r] - after)
        lacks += max(0.0, (s.device[d].held + most) / p.room[d] - 1.0)
    return float(p.overfull[0] * (1.0 + lacks)) if lacks > 0 else 0.0


@compiled
def change(p: Problem, s: State, i: int, row: int, devices: Ints) -> float:
    """Give operator i the row `row` on `devices`, and remember the old ones. Returns the time of the first event that
    this touches."""
    forward = 2 * i * p.parts
    around = p.around_edges[p.around_first[i] : p.around_first[i + 1]]
    touched = _remember(p, s, i, around)
    count_waits(p, s, around, -1)
    unload(p, s, around)
    if p.group[i] >= 0:
        hold(p, s, i, -1)
    put(p, s, i, row, devices)
    join(p, s, around)
    count_waits(p, s, around, 1)
    if p.group[i] >= 0:
        hold(p, s, i, 1)
        exchange(p, s, p.group[i])
    for k in range(p.row_parts[row]):
        if s.task[forward + k].waits == 0:
            touched = 0.0
    return touched


@compiled
def _remember(p: Problem, s: State, i: int, around: Ints) -> float:
    """Remember how operator i is placed, and take it off its devices. Returns the time of the first event that belongs
    to the operator or sends it a message."""
    M, touched = p.parts, np.inf
    forward, backward = 2 * i * M, (4 * p.n - 2 * i - 1) * M
    for d in range(p.devices):
        s.device[d].load_ = s.device[d].load
        s.device[d].held_ = s.device[d].held
        copy(s.again_[d], s.again[d])
        copy(s.since_[d], s.since[d])
        if p.group[i] >= 0:
            s.old_sync[d] = s.sync[p.group[i], d]
    copy(s.link_load_, s.link_load)
    for x in range(len(around)):
        e = around[x]
        copy(s.old_forward[x], s.forward_rows[e])
        copy(s.old_backward[x], s.backward_rows[e])
        if p.target[e] == i:
            j = p.source[e]
            touched = min(touched, s.extent[0, j].first_end)
            if holders(p, s, j) > 1:  # it may be that another reader's gradients were added up before all this
                for r in range(p.row_parts[s.row[j]] // holders(p, s, j)):
                    touched = min(touched, s.task[(4 * p.n - 2 * j - 2) * M + r].ready)
    for k in range(p.row_parts[s.row[i]]):
        s.old_place[k] = s.task[forward + k].place
        s.old_span[k] = s.task[forward + k].span
        s.old_span[M + k] = s.task[backward + k].span
        s.device[s.old_place[k]].load -= s.old_span[k] + s.old_span[M + k]
        forget(p, s, i, k)
        touched = min(touched, s.task[forward + k].ready)
    return touched


@compiled
def take_back(p: Problem, s: State, i: int, row: int, top: int) -> None:
    """Undo the last change of operator i, before which it had this row, and rows ended at `top`."""
    M, g = p.parts, p.group[i]
    forward, backward = 2 * i * M, (4 * p.n - 2 * i - 1) * M
    around = p.around_edges[p.around_first[i] : p.around_first[i + 1]]
    count_waits(p, s, around, -1)
    if g >= 0:
        hold(p, s, i, -1)
    s.row[i] = row
    for k in range(p.row_parts[row]):
        s.task[forward + k].place = s.old_place[k]
        s.task[backward + k].place = s.old_place[k]
        s.task[forward + k].span = s.old_span[k]
        s.task[backward + k].span = s.old_span[M + k]
    pass_on(p, s, i)
    for x in range(len(around)):
        copy(s.forward_rows[around[x]], s.old_forward[x])
        copy(s.backward_rows[around[x]], s.old_backward[x])
    count_waits(p, s, around, 1)
    if g >= 0:
        hold(p, s, i, 1)
    for d in range(p.devices):
        s.device[d].load = s.device[d].load_
        s.device[d].held = s.device[d].held_
        copy(s.again[d], s.again_[d])
        copy(s.since[d], s.since_[d])
        if g >= 0:
            s.sync[g, d] = s.old_sync[d]
    copy(s.link_load, s.link_load_)
    s.top[0] = top
