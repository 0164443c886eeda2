"""The fastest of all strategies, for spaces of up to some 10^10; compiled. Operators get their configs one after the
other, depth first; a branch is left where even the best of it cannot beat the best known strategy, by a bound that is
never above the true seconds, as in A*:

    load    no device does its part of what is placed, and of what is not no device does less than the mean
    path    the longest path through what is placed, on through the rest, and all the way back (`trips`)

After the path back, devices exchange weights: those at least that the placed operators have in common.

If no device and no link were ever busy, a part would wait for what it reads and for nothing else. A step would then
take a longest path, forward to the last operator and all the way back: through the operators that are placed as they
are, and from there through the others as they would be at their best. For each config of an operator,

    trip[config, K, L]    the least time from the forward of the parts K to the last gradient that the parts L wait for,
                          whatever the configs of the operators after it

    conv1 ─▶ conv2 ─▶ │ fc1 ─▶ fc2      placed are conv1 and conv2. The parts K of conv2 end at t or later, the parts L
                  K ─▶│────────┐        take u or more from their gradients to the end of the step: it takes at least
    conv1 ◀─ conv2 ◀─ │ fc1 ◀─ fc2      t + trip[config of conv2, K, L] + u
                  L ◀─│────────┘

That is true of any K and L. Those that say most are all parts that end as late as one of them or later, and all that
take as long as one of them or longer: as many pairs as the operator has parts, squared.

A set of parts is a number, with bit k for part k.
"""

from __future__ import annotations

from itertools import permutations
from time import monotonic
from typing import NamedTuple

import numpy as np

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.planning.operators.compiled.delta_simulation import attempt
from fxpipe.planning.operators.compiled.edge_messages import hold, overlaps
from fxpipe.planning.operators.compiled.flat_arrays import Floats, Ints, Problem, State, state
from fxpipe.planning.operators.compiled.graph_update import copy, put
from fxpipe.planning.operators.compiled.metropolis import has_room
from fxpipe.planning.operators.compiled.numba_compiler import allocating, compiled, entry
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.expert_strategies import data_parallel
from fxpipe.planning.operators.operator_costs import Cost, estimated
from fxpipe.planning.operators.strategy_search import Found

MOST_PARTS = 6  # the bounds are about sets of parts
SAME = 1 - 1e-12  # strategies whose seconds differ by less are equally fast; so much for the rounding of bounds
NEVER = -np.inf  # the time of what need not happen


def best_of_all(
    graph: OperatorGraph,
    cluster: Cluster,
    cost: Cost | None = None,
    start: Strategy | None = None,
    anywhere: bool = False,
) -> Found:
    """The fastest strategy of the whole space of `strategy_space.configs`, for graphs of some ten operators and few
    devices: the operators cut in any dimensions, on any run of neighbouring devices; or `anywhere`, each part on any
    device that has no other part of the operator. What is slower than `start` (data parallelism) is left out unseen, so
    that a good one makes it quick. To a 10^12th part: a strategy that is faster by less may be missed."""
    first = start or data_parallel(graph, len(cluster.devices))
    core = Core(graph, cluster, cost or estimated(), (first,))
    p = core.problem
    if p.parts > MOST_PARTS:
        raise ValueError(f"all strategies are searched for up to {MOST_PARTS} parts; here operators have {p.parts}")
    begun, seconds = monotonic(), core.begin(first)
    while (tried := exhaust(p, choices(p, anywhere), core.state, state(p, p.parts**2), *core.best_arrays)) < 0:
        core.grow()
    best, least = core.best
    return Found(best, least, True, tried, ((monotonic() - begun, least),), (("start", seconds),))


class Choices(NamedTuple):
    """The configs that each operator may have, one operator's after the other's."""

    first: Ints  # [n + 1]
    row: Ints  # [choices]
    place: Ints  # [choices, M]


def choices(p: Problem, anywhere: bool = False) -> Choices:
    """All configs on runs of neighbouring devices; or `anywhere`, with each part on a device that has no other part."""
    first, row, place = [0], [], []
    for i in range(p.n):
        for own in range(p.row_first[i], p.row_first[i + 1]):
            parts = int(p.row_parts[own])
            runs = (range(d, d + parts) for d in range(p.devices - parts + 1))
            for devices in permutations(range(p.devices), parts) if anywhere else runs:
                row.append(own)
                place.append([*devices] + [0] * (p.parts - parts))
        first.append(len(row))
    return Choices(np.array(first), np.array(row), np.array(place))


class Trips(NamedTuple):
    """What is known of the choices before any is taken. Operators of edge e in rows `a` and `b`, counted from their
    first ones, exchange `read[read_first[e] + a * rows of the consumer + b]`."""

    parts: Ints  # [choices]
    work: Floats  # [choices, M, 2] seconds of each part, forward and backward
    holds: Ints  # [choices, D] shares of the weights, as a set
    read_first: Ints  # [E + 1]
    read: Floats  # [pairs of rows, M, M] bytes of part k that part m reads
    slowness: Floats  # [D, D] seconds for a byte
    trip: Floats  # [choices, 2^M, 2^M]


@allocating
def trips(p: Problem, c: Choices, s: State) -> Trips:
    """The tables. `s` is room to work in, for the messages of one edge."""
    M, choices = p.parts, len(c.row)
    rows = p.row_first[1:] - p.row_first[:-1]
    read_first = np.zeros(len(p.source) + 1, np.int64)
    for e in range(len(p.source)):
        read_first[e + 1] = read_first[e] + rows[p.source[e]] * rows[p.target[e]]
    t = Trips(
        np.zeros(choices, np.int64),
        np.zeros((choices, M, 2)),
        np.zeros((choices, p.devices), np.int64),
        read_first,
        np.zeros((read_first[-1], M, M)),
        1 / p.rate,
        np.full((choices, 1 << M, 1 << M), NEVER),
    )
    for i in range(p.n):
        for choice in range(c.first[i], c.first[i + 1]):
            _note(p, c, s, t, i, choice)
    for e in range(len(p.source)):
        _reads(p, s, t, e)
    for i in range(p.n - 1, -1, -1):
        _from_operator(p, c, t, i)
    return t


@compiled
def _note(p: Problem, c: Choices, s: State, t: Trips, i: int, choice: int) -> None:
    """Who does how much when operator i has this config, and who holds which of its weights."""
    row, g = c.row[choice], p.group[i]
    put(p, s, i, row, c.place[choice])
    t.parts[choice] = p.row_parts[row]
    for k in range(p.row_parts[row]):
        t.work[choice, k, 0] = s.task[2 * i * p.parts + k].span
        t.work[choice, k, 1] = s.task[(4 * p.n - 2 * i - 1) * p.parts + k].span
    if g >= 0:
        hold(p, s, i, 1)
        for d in range(p.devices):
            for u in range(p.shares):
                if s.cover[g, d, u] > 0:
                    t.holds[choice, d] |= 1 << u
        hold(p, s, i, -1)


@compiled
def _reads(p: Problem, s: State, t: Trips, e: int) -> None:
    """How much moves along an edge, for any degrees of its operators."""
    i, j, pair = p.source[e], p.target[e], t.read_first[e]
    first = s.pair_first
    for a in range(p.row_first[i], p.row_first[i + 1]):
        for b in range(p.row_first[j], p.row_first[j + 1]):
            cuts, sizes, parts = (p.degrees[a], p.degrees[b]), (p.sizes[i], p.sizes[j]), p.row_parts[b]
            overlaps(*cuts, *sizes, p.need[e], parts, first, s.pair[0], s.volume, s.scratch)
            for m in range(parts):
                for x in range(first[m], first[m + 1]):
                    t.read[pair, s.pair[0, x], m] = s.volume[x] * p.element
            pair += 1


@compiled
def between(p: Problem, c: Choices, t: Trips, e: int, a: int, b: int) -> int:
    """Where in `read` an edge is when its operators have the choices a and b."""
    i, j = p.source[e], p.target[e]
    rows = p.row_first[j + 1] - p.row_first[j]
    return int(t.read_first[e] + (c.row[a] - p.row_first[i]) * rows + c.row[b] - p.row_first[j])


@compiled
def message(p: Problem, t: Trips, size: float, sender: int, receiver: int) -> float:
    """Seconds of a message, which are none within a device."""
    return 0.0 if sender == receiver else p.latency[sender, receiver] + size * t.slowness[sender, receiver]


@allocating
def _from_operator(p: Problem, c: Choices, t: Trips, i: int) -> None:
    """The trips from operator i, given those from all later ones: by each operator that reads it, the longest."""
    sets, M = 1 << p.parts, p.parts
    ends, tails, least = np.empty((sets, M)), np.empty((sets, M)), np.empty((sets, sets))
    for choice in range(c.first[i], c.first[i + 1]):
        own = 1 << t.parts[choice]
        if p.out_first[i] == p.out_first[i + 1]:  # the last: a part's backward follows its forward
            for K in range(own):
                for L in range(own):
                    if K & L:
                        t.trip[choice, K, L] = 0.0
        for x in range(p.out_first[i], p.out_first[i + 1]):
            e = p.out_edges[x]
            least.fill(np.inf)
            for other in range(c.first[p.target[e]], c.first[p.target[e] + 1]):
                for K in range(1, own):
                    _across(p, c, t, e, choice, other, K, ends[K], tails[K])
                for K in range(1, own):
                    for L in range(1, own):
                        least[K, L] = min(least[K, L], trip(t, other, ends[K], tails[L]))
            for K in range(1, own):
                for L in range(1, own):
                    t.trip[choice, K, L] = max(t.trip[choice, K, L], least[K, L])


@compiled
def _across(p: Problem, c: Choices, t: Trips, e: int, a: int, b: int, K: int, ends: Floats, tails: Floats) -> None:
    """The ends of the consumer's parts when the producer's parts K end at 0, and how long it takes from the consumer's
    gradients to the last that K wait for."""
    ends.fill(NEVER)
    tails.fill(NEVER)
    pair = between(p, c, t, e, a, b)
    for m in range(t.parts[b]):
        for k in range(t.parts[a]):
            size, here, there = t.read[pair, k, m], c.place[a, k], c.place[b, m]
            if K >> k & 1 and size > 0:
                ends[m] = max(ends[m], message(p, t, size, here, there) + t.work[b, m, 0])
                tails[m] = max(tails[m], message(p, t, size, there, here) + t.work[b, m, 1])


@compiled
def trip(t: Trips, choice: int, ends: Floats, tails: Floats) -> float:
    """The least seconds of a step in which the parts of an operator with this config end forward at `ends` or later,
    and take `tails` or longer from their gradients to the end of the step."""
    most, parts = NEVER, t.parts[choice]
    for k in range(parts):
        for m in range(parts):
            if ends[k] > NEVER and tails[m] > NEVER:
                late, long = _since(ends, parts, ends[k]), _since(tails, parts, tails[m])
                most = max(most, ends[k] + t.trip[choice, late, long] + tails[m])
    return most


@compiled
def _since(times: Floats, parts: int, time: float) -> int:
    """The set of parts with this time or a later one."""
    found = 0
    for k in range(parts):
        if times[k] >= time:
            found |= 1 << k
    return found


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
    """Find the fastest strategy that takes less than `best[0]` seconds, and put it where `block_moves.explore` does.
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
