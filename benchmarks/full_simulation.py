"""The time of a strategy from nothing (the SOAP paper's algorithm 1), compiled. The task graph is made anew, every
computation and every message is a task of it, and all of them go through one queue in the order of (ready, key). It is
what delta simulation is compared with: times equal to the last bit, and how much faster."""

from __future__ import annotations

import numpy as np

from fxpipe.planning.operators.compiled.edge_messages import gradient_slots, has_sums, holders
from fxpipe.planning.operators.compiled.event_queue import pop, push
from fxpipe.planning.operators.compiled.flat_arrays import EVENT, Floats, Ints, Problem, State, state
from fxpipe.planning.operators.compiled.graph_update import build
from fxpipe.planning.operators.compiled.metropolis import begin, propose, threshold
from fxpipe.planning.operators.compiled.numba_compiler import allocating, compiled, entry
from fxpipe.planning.operators.compiled_core import Core


class FullCore(Core):
    """The core of a search, which can also simulate from nothing."""

    _work: tuple[State, Floats] | None = None

    def differences(self) -> int:
        """How many times of tasks are not those of a simulation from nothing: 0 if all is well."""
        work, times = self._room()
        n, parts = self.problem.n, self.problem.parts
        rows, places = self.state.row, self.state.task["place"][: 2 * n * parts].reshape(2 * n, parts)[::2]
        placed = np.ascontiguousarray(places, np.int64)
        return int(differences(self.problem, self.state, work, rows, placed, times))

    def walk_from_nothing(self, steps: int, temperature: float) -> None:
        """The chain of `explore` without leaps, with algorithm 1 for each proposal. Needs room from the start."""
        rows, places = self.arrays(self.strategy)
        chain = rows, places, np.array([self.seconds]), self._room()[1], np.zeros(self.problem.parts, np.int64)
        if walk_from_nothing(self.problem, self.state, self.random, steps, temperature, *chain) < 0:
            raise ValueError(f"{len(self.state.message)} messages are too few; make the core with more")
        begin(self.problem, self.state, rows, places)

    def _room(self) -> tuple[State, Floats]:
        """A second state of the same size, and a line for each of its tasks: what algorithm 1 works in."""
        p, messages = self.problem, len(self.state.message)
        if self._work is None or len(self._work[0].message) != messages:
            tasks = 6 * p.n * p.parts + p.groups * (1 + p.devices) + messages
            self._work = state(p, messages), np.zeros((tasks, 3))
        return self._work


@allocating
def full(p: Problem, s: State, rows: Ints, devices: Ints, times: Floats) -> float:
    """Seconds of a strategy; `s` is room to work in, `times` for ready, start and end of each task: computations and
    gatherings by slots, then messages as they lie in `s`, then what devices pass on in groups, and in sums. Minus one
    if there is no room for all messages."""
    if not build(p, s, rows, devices):
        return -1.0
    n, M, D = p.n, p.parts, p.devices
    slots = 4 * n * M
    messages = slots + p.groups
    exchanges = messages + s.top[0]
    rings = exchanges + p.groups * D
    count = rings + 2 * n * M
    place = np.full(count, -1)
    seconds = np.zeros(count)
    key = np.zeros(count, np.int64)
    wide = (len(p.source) * M + M + 2) * M  # keys of messages lie between those of computations
    for t in range(slots):
        if (t // M & 1 == 1) == (t < 2 * n * M):
            continue
        place[t] = s.task[t].place
        seconds[t] = s.task[t].span
    key[:messages] = np.arange(messages) * wide
    edge_from = np.empty((2 * s.top[0] + 4 * slots) * (M + 1) + p.groups * D, np.int64)
    edge_to = np.empty_like(edge_from)
    edges = 0
    exists = np.zeros(count, np.bool_)
    for i in range(n):
        each = holders(p, s, i)
        for k in range(p.row_parts[s.row[i]]):
            forward, backward = 2 * i * M + k, (4 * n - 2 * i - 1) * M + k
            exists[forward] = True
            exists[backward] = True
            total = (2 * i + 1) * M + k // each
            if has_sums(p, s, i):
                exists[total] = True
                edge_from[edges], edge_to[edges] = forward, total
                edges += 1
            for way in range(2):
                t, line = (total, i) if way == 0 else ((4 * n - 2 * i - 2) * M + k // each, n + i)
                ring = rings + line * M + k
                if s.ring[line, k].lasts > 0 and (has_sums(p, s, i) if way == 0 else s.task[t].waits > 0):
                    exists[ring] = True
                    place[ring] = D + s.ring[line, k].wire
                    seconds[ring] = s.ring[line, k].lasts
                    key[ring] = key[t] + 1 + k % each
                    edge_from[edges], edge_to[edges] = t, ring
                    edges += 1
            if s.task[backward].waits == 0:
                edges = _after_sum(p, s, i, k, backward, 0, rings, edge_from, edge_to, edges)
            total = (4 * n - 2 * i - 2) * M + k // each
            if s.task[total].waits > 0:
                exists[total] = True
                edges = _after_sum(p, s, i, k, backward, 1, rings, edge_from, edge_to, edges)
            if p.group[i] >= 0:
                exists[slots + p.group[i]] = True
                edge_from[edges], edge_to[edges] = backward, slots + p.group[i]
                edges += 1
    for e in range(len(p.source)):
        for way in range(2):
            i, j = (p.source[e], p.target[e]) if way == 0 else (p.target[e], p.source[e])
            rows_of = s.forward_rows[e] if way == 0 else s.backward_rows[e]
            sender = 2 * i * M if way == 0 else (4 * n - 2 * i - 1) * M
            receiver, each = (2 * j * M, 1) if way == 0 else gradient_slots(p, s, e)
            summed = way == 0 and has_sums(p, s, i)
            for k in range(p.row_parts[s.row[i]]):
                for x in range(rows_of[k], rows_of[k + 1]):
                    to = receiver + s.message[x].peer // each
                    first = messages + x if s.message[x].wire >= 0 else to
                    if summed:
                        edges = _after_sum(p, s, i, k, first, 0, rings, edge_from, edge_to, edges)
                    else:
                        edge_from[edges], edge_to[edges] = sender + k, first
                        edges += 1
                    if first != to:
                        turn = sender + M + k // holders(p, s, i) if summed else sender + k
                        exists[first] = True
                        place[first] = D + s.message[x].wire
                        seconds[first] = s.message[x].lasts
                        order = k % holders(p, s, i) * len(p.source) if summed else 0
                        key[first] = key[turn] + 1 + M + (order + e) * M + s.message[x].peer
                        edge_from[edges], edge_to[edges] = first, to
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


@compiled
def _after_sum(
    p: Problem,
    s: State,
    i: int,
    k: int,
    to: int,
    way: int,
    rings: int,
    edge_from: Ints,
    edge_to: Ints,
    edges: int,
) -> int:
    """Task `to` waits until part k of operator i has its region (`way` 0), or that region's gradients (1). Returns the
    number of edges."""
    each, before = holders(p, s, i), edges
    if way == 0 and not has_sums(p, s, i):
        edge_from[edges], edge_to[edges] = 2 * i * p.parts + k, to
        return edges + 1
    for x in range(k // each * each, (k // each + 1) * each):
        if s.ring[way * p.n + i, x].lasts > 0:
            edge_from[edges], edge_to[edges] = rings + (way * p.n + i) * p.parts + x, to
            edges += 1
    if edges == before:
        first = (2 * i + 1) * p.parts if way == 0 else (4 * p.n - 2 * i - 2) * p.parts
        edge_from[edges], edge_to[edges] = first + k // each, to
        edges += 1
    return edges


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
    queue = np.empty(count, EVENT)
    size = 0
    for task in range(count):
        if exists[task] and waits[task] == 0:
            size = push(queue, size, 0.0, key[task] * count + task)
    most = 0.0
    while size > 0:
        task = queue[0].key % count
        size = pop(queue, size)
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
                size = push(queue, size, ready[one], key[one] * count + one)
    return most


@entry
def walk_from_nothing(
    p: Problem,
    s: State,
    random: Ints,
    steps: int,
    temperature: float,
    rows: Ints,
    place: Ints,
    cost: Floats,
    times: Floats,
    devices: Ints,
) -> int:
    """The same chain with algorithm 1 for every proposal. `rows`, `place` and `cost` are the strategy it is at."""
    old = devices.copy()
    for _ in range(steps):
        i, row = propose(p, random, devices)
        limit = threshold(cost[0], temperature, random)
        old_row = rows[i]
        old[:] = place[i]
        rows[i] = row
        place[i, : p.row_parts[row]] = devices[: p.row_parts[row]]
        seconds = full(p, s, rows, place, times)
        if seconds < 0:
            return -1
        if seconds <= limit:
            cost[0] = seconds
        else:
            rows[i] = old_row
            place[i] = old
    return steps


@entry
def differences(p: Problem, s: State, f: State, rows: Ints, devices: Ints, times: Floats) -> int:
    """How many ready, start and end times in `s` are not those of its strategy simulated from nothing, with `f` and
    `times` to work in."""
    n, M, D = p.n, p.parts, p.devices
    slots = 4 * n * M
    messages = slots + p.groups
    found = int(full(p, f, rows, devices, times) != s.cost[0])
    exchanges = messages + f.top[0]
    rings = exchanges + p.groups * D
    for i in range(n):
        each = holders(p, s, i)
        for k in range(p.row_parts[s.row[i]]):
            sums = (2 * i + 1) * M + k // each, (4 * n - 2 * i - 2) * M + k // each
            for way in range(2):
                if not (has_sums(p, s, i) if way == 0 else each > 1 and s.task[sums[way]].waits > 0):
                    continue
                one, y = s.task[sums[way]], rings + (way * n + i) * M + k
                found += one.ready != times[sums[way], 0]
                if s.ring[way * n + i, k].lasts > 0:
                    begin, lasts = s.ring[way * n + i, k].begin, s.ring[way * n + i, k].lasts
                    found += begin != times[y, 1] or begin + lasts != times[y, 2]
            for t in (2 * i * M + k, (4 * n - 2 * i - 1) * M + k):
                one = s.task[t]
                found += one.ready != times[t, 0] or one.start != times[t, 1] or one.end != times[t, 2]
    for e in range(len(p.source)):
        for way in range(2):
            theirs = f.forward_rows[e] if way == 0 else f.backward_rows[e]
            ours = s.forward_rows[e] if way == 0 else s.backward_rows[e]
            for k in range(M):
                if theirs[k + 1] - theirs[k] != ours[k + 1] - ours[k]:
                    found += 1
                    continue
                for x in range(ours[k + 1] - ours[k]):
                    one, y = s.message[ours[k] + x], messages + theirs[k] + x
                    other = f.message[theirs[k] + x]
                    found += one.wire != other.wire or one.peer != other.peer
                    if one.wire >= 0:
                        found += one.begin != times[y, 1] or one.begin + one.lasts != times[y, 2]
    for g in range(p.groups):
        found += s.task[slots + g].end != times[slots + g, 2]
        for d in range(D):
            one, y = s.sync[g, d], exchanges + g * D + d
            found += one.lasts != f.sync[g, d].lasts
            if one.lasts > 0:
                found += one.begin != times[y, 1] or one.begin + one.lasts != times[y, 2]
    return found
