"""Compiled: the fastest of all strategies, for spaces of up to some 10^10. Operators get their configs one after the
other, depth first; a branch is left where even the best of it cannot beat the best known strategy, by a bound that is
never above the true seconds, as in A*:

    load    no device does its part of what is placed, and of what is not no device does less than the mean
    path    the longest path through what is placed, on through the rest, and all the way back (`trips`)

After the path back, devices exchange weights: those at least that the placed operators have in common.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .delta_simulation import attempt
from .flat_arrays import Floats, Ints, Problem, State
from .graph_update import copy
from .metropolis import has_room
from .numba_compiler import allocating, compiled, entry
from .path_bound import Choices, Trips, between, message, trip, trips

SAME = 1 - 1e-12  # strategies whose seconds differ by less are equally fast; so much for the rounding of bounds


class Placed(NamedTuple):
    """What is known of the operators that are placed; line i of arrays with n + 1 is how it is before operator i is."""

    choice: Ints  # [n]
    bound: Floats  # [n + 1]
    load: Floats  # [n + 1, D]
    ends: Floats  # [n, M] when a part can have ended forward
    tails: Floats  # [n + 1, n, M] how long it is from a part's gradients to the end of the step
    held: Ints  # [n + 1, G, D] shares of weights, as sets
    exchange: Floats  # [n + 1, G] seconds of their exchange
    rest: Floats  # [n + 1] seconds of work of what is not placed yet
    latency: Floats  # [D] the least to any other device
    slowness: Floats  # [D]


@allocating
def nothing(p: Problem, c: Choices, t: Trips) -> Placed:
    """No operator is placed yet."""
    n, M, D, G = p.n, p.parts, p.devices, max(1, p.groups)
    rest, latency, slowness = np.zeros(n + 1), np.full(D, np.inf), np.full(D, np.inf)
    for i in range(n - 1, -1, -1):
        least = np.inf
        for choice in range(c.first[i], c.first[i + 1]):
            least = min(least, t.work[choice].sum())
        rest[i] = rest[i + 1] + least
    for d in range(D):
        for other in range(D):
            if other != d:
                latency[d] = min(latency[d], p.latency[d, other])
                slowness[d] = min(slowness[d], t.slowness[d, other])
    return Placed(
        np.zeros(n, np.int64),
        np.zeros(n + 1),
        np.zeros((n + 1, D)),
        np.zeros((n, M)),
        np.zeros((n + 1, n, M)),
        np.zeros((n + 1, G, D), np.int64),
        np.zeros((n + 1, G)),
        rest,
        latency,
        slowness,
    )


@compiled
def place(p: Problem, c: Choices, t: Trips, known: Placed, i: int, choice: int, limit: float) -> bool:
    """Give operator i a config, if the step can then take less than `limit`; all before it have theirs."""
    bound, load = known.bound[i], known.load[i + 1]
    known.choice[i] = choice
    copy(load, known.load[i])
    total = known.rest[i + 1]
    for k in range(t.parts[choice]):
        load[c.place[choice, k]] += t.work[choice, k, 0] + t.work[choice, k, 1]
    for d in range(p.devices):
        bound = max(bound, load[d])
        total += load[d]
    bound = max(bound, total / p.devices)
    if bound >= limit:
        return False
    _forward(p, c, t, known, i)
    first = _hold(p, t, known, i)
    for j in range(i):
        copy(known.tails[i + 1, j], known.tails[i, j])
    for j in range(first, i + 1):
        _backward(p, c, t, known, j, i + 1)
    known.bound[i + 1] = max(bound, trip(t, choice, known.ends[i], known.tails[i + 1, i]))
    return bool(known.bound[i + 1] < limit)


@compiled
def _forward(p: Problem, c: Choices, t: Trips, known: Placed, i: int) -> None:
    """When the parts of operator i can have ended."""
    choice, ends = known.choice[i], known.ends
    ends[i].fill(0.0)
    for x in range(p.in_first[i], p.in_first[i + 1]):
        e = p.in_edges[x]
        j, other = p.source[e], known.choice[p.source[e]]
        pair = between(p, c, t, e, other, choice)
        for m in range(t.parts[choice]):
            for k in range(t.parts[other]):
                size = t.read[pair, k, m]
                if size > 0:
                    arrives = ends[j, k] + message(p, t, size, c.place[other, k], c.place[choice, m])
                    ends[i, m] = max(ends[i, m], arrives)
    for m in range(t.parts[choice]):
        ends[i, m] += t.work[choice, m, 0]


@compiled
def _backward(p: Problem, c: Choices, t: Trips, known: Placed, i: int, at: int) -> None:
    """How long it is from the gradients of operator i's parts to the end of the step."""
    choice, tails = known.choice[i], known.tails[at]
    tails[i].fill(known.exchange[at, p.group[i]] if p.group[i] >= 0 else 0.0)
    for x in range(p.in_first[i], p.in_first[i + 1]):
        e = p.in_edges[x]
        j, other = p.source[e], known.choice[p.source[e]]
        pair = between(p, c, t, e, other, choice)
        for m in range(t.parts[choice]):
            for k in range(t.parts[other]):
                size = t.read[pair, k, m]
                if size > 0:
                    sent = message(p, t, size, c.place[choice, m], c.place[other, k])
                    tails[i, m] = max(tails[i, m], sent + tails[j, k])
    for m in range(t.parts[choice]):
        tails[i, m] += t.work[choice, m, 1]


@compiled
def _hold(p: Problem, t: Trips, known: Placed, i: int) -> int:
    """Note who holds operator i's weights. Returns the first operator with a tail that this makes longer."""
    for g in range(p.groups):
        known.exchange[i + 1, g] = known.exchange[i, g]
        copy(known.held[i + 1, g], known.held[i, g])
    g = p.group[i]
    if g < 0:
        return i
    held = known.held[i + 1, g]
    for d in range(p.devices):
        held[d] |= t.holds[known.choice[i], d]
    most, share = 0.0, p.group_bytes[g] / p.shares
    for d in range(p.devices):
        passed = 0.0
        for u in range(p.shares):
            if held[d] >> u & 1:
                holders = 0
                for other in range(p.devices):
                    holders += held[other] >> u & 1
                passed += 2 * (holders - 1) / holders * share
        if passed > 0:
            most = max(most, known.latency[d] + passed * known.slowness[d])
    known.exchange[i + 1, g] = most
    return int(p.group_members[p.group_first[g]]) if most > known.exchange[i, g] else i


@compiled
def simulate(p: Problem, c: Choices, s: State, at: Ints, choice: Ints, limit: float) -> int:
    """Simulate a strategy, changing what `s` is `at`. Returns whether it takes less than `limit`, -1 if there is no
    room."""
    last = p.n - 1
    for i in range(p.n):
        if at[i] != choice[i]:
            row = c.row[choice[i]]
            if not has_room(p, s, i, row):
                return -1
            if not attempt(p, s, i, row, c.place[choice[i]], limit if i == last else np.inf):
                return 0
            at[i] = choice[i]
    return int(s.cost[0] <= limit)


@entry
def exhaust(p: Problem, c: Choices, s: State, work: State, best: Floats, best_row: Ints, best_place: Ints) -> int:
    """Find the fastest strategy that takes less than `best[0]` seconds; what it is goes where `chain.walk` puts it.
    `work` is a second state to work in. Returns how many strategies were simulated, or -1 where there was no room."""
    n = p.n
    t = trips(p, c, work)
    known = nothing(p, c, t)
    at, following = np.full(n, -1), c.first[:-1].copy()
    i, simulated = 0, 0
    while i >= 0:
        choice = following[i]
        if choice == c.first[i + 1]:
            i -= 1
            continue
        following[i] += 1
        if not place(p, c, t, known, i, choice, best[0] * SAME):
            continue
        if i < n - 1:
            i += 1
            following[i] = c.first[i]
            continue
        simulated += 1
        faster = simulate(p, c, s, at, known.choice, np.nextafter(best[0], 0.0))
        if faster < 0:
            return -1
        if faster:
            best[0] = s.cost[0]
            for j in range(n):
                best_row[j] = c.row[at[j]]
                copy(best_place[j], c.place[at[j]])
    return simulated
