"""Compiled: leaps, which change many operators at once, and a Markov chain of leaps and single changes.

A better strategy may be reachable by single changes only through worse ones. A shared layer is unrolled into forty
operators, and changing one of them saves nothing of the exchange of the layer's weights. Neighbours that are cut alike
send each other little, and changing one of them makes it more. A leap changes all operators of a window:

    order         window                   they all become
    as they run   conv1 conv2 pool2 ...    sample/2 channel/2, from device 4 on
    by weights    lstm0.3 .. lstm0.20      as an operator beside them is
    by likeness   all convolutions alike   as they are, but on devices further on

The edges of a window are made anew and the step is simulated from the beginning, which takes a few times as long as a
single change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .cut_patterns import Patterns
from .delta_simulation import MARGIN, attempt, keep, run
from .edge_messages import count_waits, exchange, hold, join, pass_on, unload
from .flat_arrays import Floats, Ints, Problem, State
from .graph_update import compact, copy, excess, forget, is_jam, put
from .metropolis import below, choose, has_room, propose, threshold, uniform
from .numba_compiler import compiled, entry
from .restart_state import restart


class Leap(NamedTuple):
    """A leap while it is tried: the strategy it leads to (`rows`, `places`), and what is needed to undo it (`old_...`).
    An edge or group is marked in this leap if its mark equals `turn`."""

    rows: Ints  # [n]
    places: Ints  # [n, M]
    edges: Ints  # [E] edges with an end in the window, `counts[0]` of them
    groups: Ints  # [G] groups of weights with a member in the window, `counts[1]` of them
    counts: Ints  # [2]
    turn: Ints  # [1]
    edge_mark: Ints  # [E]
    group_mark: Ints  # [G]
    old_forward: Ints  # [E, M + 1] by edge
    old_backward: Ints
    old_spans: Floats  # [n, 2 M]


def leap(p: Problem) -> Leap:
    """Arrays for the leaps of a problem."""
    edges, groups = len(p.source), max(1, p.groups)

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return Leap(
        rows=ints(p.n),
        places=ints(p.n, p.parts),
        edges=ints(edges),
        groups=ints(groups),
        counts=ints(2),
        turn=ints(1),
        edge_mark=ints(edges),
        group_mark=ints(groups),
        old_forward=ints(edges, p.parts + 1),
        old_backward=ints(edges, p.parts + 1),
        old_spans=np.zeros((p.n, 2 * p.parts)),
    )


@compiled
def window(q: Patterns, random: Ints) -> tuple[int, int, int]:
    """Draw an order and a window of it, (order, first, after): a whole block, or a run in a block, whose length is
    log-uniform."""
    order = below(random, len(q.order))
    at = below(random, q.order.shape[1])
    first, after = q.block_first[order, at], q.block_after[order, at]
    if uniform(random) < 0.5:
        length = int(np.exp(uniform(random) * np.log(after - first + 1.0)))
        first = max(first, at - below(random, length))
        after = min(after, first + length)
    return order, first, after


@compiled
def neighbour(p: Problem, i: int, random: Ints) -> int:
    """Draw an operator that operator i reads or that reads i; i itself if there is none."""
    inner = p.in_first[i + 1] - p.in_first[i]
    outer = p.out_first[i + 1] - p.out_first[i]
    if inner + outer == 0:
        return i
    x = below(random, inner + outer)
    if x < inner:
        return int(p.source[p.in_edges[p.in_first[i] + x]])
    return int(p.target[p.out_edges[p.out_first[i] + x - inner]])


@compiled
def draw(p: Problem, q: Patterns, random: Ints, to: Leap, members: Ints, devices: Ints) -> None:
    """Draw a leap of the operators `members`, and apply it to the strategy in `to`."""
    lead = members[below(random, len(members))]
    way = uniform(random)
    if way < 0.2:
        far = 1 + below(random, p.devices - 1) if p.devices > 1 else 0
        for i in members:
            move(p, to, i, to.rows[i], (to.places[i, 0] + far) % p.devices)
        return
    if way < 0.6:
        lead = neighbour(p, lead, random)
        row, begin = to.rows[lead], to.places[lead, 0]
    else:
        low, high = p.choice_first[p.row_first[lead]], p.choice_first[p.row_first[lead + 1]]
        row = choose(p, lead, low + below(random, high - low), devices)
        begin = devices[0]
    for i in members:
        move(p, to, i, q.row_for[q.pattern_of[row], i], begin)


@compiled
def move(p: Problem, to: Leap, i: int, row: int, first: int) -> None:
    """Give operator i the row `row`, on neighbouring devices from `first` on, or on the last ones if those are too
    few; an operator with more parts than there are devices stays as it is."""
    if p.row_parts[row] > p.devices:
        return
    first = min(first, p.devices - p.row_parts[row])
    to.rows[i] = row
    for k in range(p.row_parts[row]):
        to.places[i, k] = first + k


@compiled
def note(p: Problem, s: State, to: Leap, i: int) -> None:
    """Copy the row and devices of operator i from the state to `to`."""
    to.rows[i] = s.row[i]
    for k in range(p.parts):
        to.places[i, k] = s.task[2 * i * p.parts + k].place


@compiled
def mark(p: Problem, to: Leap, members: Ints) -> None:
    """Collect the edges and groups of weights that a change of these operators touches, each once."""
    to.turn[0] += 1
    turn = to.turn[0]
    to.counts.fill(0)
    for i in members:
        for side in range(2):
            first, edges = (p.in_first, p.in_edges) if side == 0 else (p.out_first, p.out_edges)
            for x in range(first[i], first[i + 1]):
                e = edges[x]
                if to.edge_mark[e] != turn:
                    to.edge_mark[e] = turn
                    to.edges[to.counts[0]] = e
                    to.counts[0] += 1
        g = p.group[i]
        if g >= 0 and to.group_mark[g] != turn:
            to.group_mark[g] = turn
            to.groups[to.counts[1]] = g
            to.counts[1] += 1


@compiled
def fits(p: Problem, s: State, to: Leap) -> bool:
    """Whether the messages of all marked edges fit behind those in use, after compaction if necessary."""
    more = 0
    for e in to.edges[: to.counts[0]]:
        more += 2 * p.row_parts[to.rows[p.source[e]]] * p.row_parts[to.rows[p.target[e]]]
    if s.top[0] + more > len(s.message):
        compact(p, s)
    return bool(s.top[0] + more <= len(s.message))


@compiled
def take(p: Problem, s: State, to: Leap, members: Ints) -> None:
    """Exchange the rows and devices of all members between the state and `to`, which then has the old ones."""
    M = p.parts
    for d in range(p.devices):
        s.device[d].load_ = s.device[d].load
        s.device[d].held_ = s.device[d].held
        copy(s.again_[d], s.again[d])
        copy(s.since_[d], s.since[d])
    copy(s.link_load_, s.link_load)
    edges = to.edges[: to.counts[0]]
    for e in edges:
        copy(to.old_forward[e], s.forward_rows[e])
        copy(to.old_backward[e], s.backward_rows[e])
    count_waits(p, s, edges, -1)
    unload(p, s, edges)
    for i in members:
        if p.group[i] >= 0:
            hold(p, s, i, -1)
        forward, backward = 2 * i * M, (4 * p.n - 2 * i - 1) * M
        for k in range(p.row_parts[s.row[i]]):
            s.device[s.task[forward + k].place].load -= s.task[forward + k].span + s.task[backward + k].span
            forget(p, s, i, k)
        row = s.row[i]
        for k in range(M):
            to.old_spans[i, k] = s.task[forward + k].span
            to.old_spans[i, M + k] = s.task[backward + k].span
            s.old_place[k] = s.task[forward + k].place
        put(p, s, i, to.rows[i], to.places[i])
        to.rows[i] = row
        copy(to.places[i], s.old_place)
    join(p, s, edges)
    count_waits(p, s, edges, 1)
    _hold_again(p, s, to, members)


@compiled
def _hold_again(p: Problem, s: State, to: Leap, members: Ints) -> None:
    for i in members:
        if p.group[i] >= 0:
            hold(p, s, i, 1)
    for g in to.groups[: to.counts[1]]:
        exchange(p, s, g)


@compiled
def go_back(p: Problem, s: State, to: Leap, members: Ints, top: int) -> None:
    """Undo `take`, before which rows ended at `top`."""
    M = p.parts
    edges = to.edges[: to.counts[0]]
    count_waits(p, s, edges, -1)
    for i in members:
        if p.group[i] >= 0:
            hold(p, s, i, -1)
        forward, backward = 2 * i * M, (4 * p.n - 2 * i - 1) * M
        s.row[i] = to.rows[i]
        for k in range(M):
            s.task[forward + k].place = s.task[backward + k].place = to.places[i, k]
            s.task[forward + k].span = to.old_spans[i, k]
            s.task[backward + k].span = to.old_spans[i, M + k]
        pass_on(p, s, i)
    for e in edges:
        copy(s.forward_rows[e], to.old_forward[e])
        copy(s.backward_rows[e], to.old_backward[e])
    count_waits(p, s, edges, 1)
    _hold_again(p, s, to, members)
    for d in range(p.devices):
        s.device[d].load = s.device[d].load_
        s.device[d].held = s.device[d].held_
        copy(s.again[d], s.again_[d])
        copy(s.since[d], s.since_[d])
    copy(s.link_load, s.link_load_)
    s.top[0] = top


@compiled
def attempt_leap(p: Problem, s: State, to: Leap, members: Ints, limit: float) -> bool:
    """Go to the strategy in `to`, which differs in `members`, and stay there if its step takes no longer than `limit`
    seconds; returns whether it does. Afterwards `to` is the strategy of the state in any case."""
    top = s.top[0]
    take(p, s, to, members)
    cost, more = np.inf, excess(p, s)
    if not is_jam(p, s, (limit - more) * MARGIN):
        cost = run(p, s, restart(p, s, -1, 0.0), limit - more) + more
    if cost <= limit:
        keep(p, s, -1, 0.0, cost)
        for i in members:
            note(p, s, to, i)
        return True
    go_back(p, s, to, members, top)
    return False


@entry
def explore(
    p: Problem,
    q: Patterns,
    s: State,
    to: Leap,
    random: Ints,
    steps: int,
    temperature: float,
    share: float,
    best: Floats,
    best_row: Ints,
    best_place: Ints,
    trace: Floats,
    devices: Ints,
) -> int:
    """Go `steps` steps, from the strategy in `s`; a `share` of them are leaps. Returns how many were taken: fewer if
    there was no room for messages.

    - `best`: one number, the best cost in seconds; its strategy is in `best_row` and `best_place`.
    - `trace`: gets the number of improvements in `[0, 0]`, and then (step, cost) of each.
    - `devices`: scratch.
    """
    found = 0
    for i in range(p.n):
        note(p, s, to, i)
    for step in range(steps):
        again, room = random[0], True
        if share > 0 and uniform(random) < share:
            order, first, after = window(q, random)
            members = q.order[order, first:after]
            draw(p, q, random, to, members, devices)
            mark(p, to, members)
            room = fits(p, s, to)
            if room:
                limit = threshold(s.cost[0], temperature, random)
                attempt_leap(p, s, to, members, limit)
        else:
            i, row = propose(p, random, devices)
            room = has_room(p, s, i, row)
            if room:
                limit = threshold(s.cost[0], temperature, random)
                attempt(p, s, i, row, devices, limit)
                note(p, s, to, i)
        if not room:
            random[0] = again
            trace[0, 0] = found
            return step
        if s.cost[0] < best[0]:
            best[0] = s.cost[0]
            copy(best_row, to.rows)  # numba would compile more for a slice: a message about shapes
            for i in range(p.n):
                copy(best_place[i], to.places[i])
            found += 1
            trace[found, 0] = step
            trace[found, 1] = best[0]
    trace[0, 0] = found
    return steps
