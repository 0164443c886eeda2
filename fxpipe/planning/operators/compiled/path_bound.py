"""Compiled: how soon a step can be over when only its first operators are placed, for exhaustive search to leave off.

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
from typing import NamedTuple

import numpy as np

from .edge_messages import hold, overlaps
from .flat_arrays import Floats, Ints, Problem, State
from .graph_update import put
from .numba_compiler import allocating, compiled

NEVER = -np.inf  # the time of what need not happen


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
        t.work[choice, k, 0] = s.task[i * p.parts + k].span
        t.work[choice, k, 1] = s.task[(2 * p.n - 1 - i) * p.parts + k].span
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
    first = s.backward_rows[e]
    for a in range(p.row_first[i], p.row_first[i + 1]):
        for b in range(p.row_first[j], p.row_first[j + 1]):
            cuts, sizes, parts = (p.degrees[a], p.degrees[b]), (p.sizes[i], p.sizes[j]), p.row_parts[b]
            overlaps(*cuts, *sizes, p.need[e], parts, first, s.message, s.volume, s.scratch, 0)
            for m in range(parts):
                for x in range(first[m], first[m + 1]):
                    t.read[pair, s.message[x].peer, m] = s.volume[x] * p.element
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
