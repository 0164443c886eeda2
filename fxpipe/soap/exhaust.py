"""Compiled: the fastest of all strategies, for spaces of some millions. Operators get their configs one after the
other, depth first; a branch is left where even the best of it cannot beat the best known strategy, by a bound that is
never above the true seconds, as in A*:

    load    no device does its part of what is placed, and of what is not no device does less than the mean
    path    the longest chain of operators, forward and back, each taking at least its quickest part
"""

from __future__ import annotations

import numpy as np

from .arrays import Floats, Ints, Problem, State
from .chain import choose, has_room
from .change import copy
from .compiled import compiled, entry
from .delta import attempt

SAFE = 1 - 1e-9  # the bounds' own rounding never cuts off a strategy as fast as the best


@compiled
def quickest(p: Problem, row: int, result: Floats) -> None:
    """Into `result`, of all kinds of devices the least: work of all parts, forward of the quickest part, backward."""
    first = p.seconds_first[row]
    result.fill(np.inf)
    for kind in range(len(p.seconds)):
        work = 0.0
        for k in range(first, first + p.row_parts[row]):
            work += p.seconds[kind, k, 0] + p.seconds[kind, k, 1]
            result[1] = min(result[1], p.seconds[kind, k, 0])
            result[2] = min(result[2], p.seconds[kind, k, 1])
        result[0] = min(result[0], work)


@compiled
def path(p: Problem, least: Floats, forward: Floats, backward: Floats) -> float:
    """The longest chain: forward from an operator to its readers, and at the end of that all the way back."""
    longest = 0.0
    for i in range(p.n):
        forward[i] = 0.0
        backward[i] = 0.0
        for x in range(p.in_first[i], p.in_first[i + 1]):
            j = p.source[p.in_edges[x]]
            forward[i] = max(forward[i], forward[j])
            backward[i] = max(backward[i], backward[j])
        forward[i] += least[i, 1]
        backward[i] += least[i, 2]
        longest = max(longest, forward[i] + backward[i])
    return longest


@entry
def exhaust(p: Problem, s: State, best: Floats, best_row: Ints, best_place: Ints, devices: Ints) -> int:
    """Find the fastest strategy that takes less than `best[0]` seconds; what it is goes where `chain.walk` puts it.
    Returns how many strategies were simulated, or -1 where there was no room."""
    n, M, D = p.n, p.parts, p.devices
    least = np.full((n, 3), np.inf)  # of the operators that are not placed yet, over all their rows
    free = np.empty((n, 3))
    one = np.empty(3)
    for i in range(n):
        for row in range(p.row_first[i], p.row_first[i + 1]):
            quickest(p, row, one)
            for x in range(3):
                least[i, x] = min(least[i, x], one[x])
    free[:] = least
    rest = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        rest[i] = rest[i + 1] + free[i, 0]
    load = np.zeros((n + 1, D))
    forward, backward = np.empty(n), np.empty(n)
    next_choice = np.empty(n, np.int64)
    next_choice[0] = p.choice_first[p.row_first[0]]
    i, simulated = 0, 0
    while i >= 0:
        choice = next_choice[i]
        if choice == p.choice_first[p.row_first[i + 1]]:
            least[i] = free[i]
            i -= 1
            continue
        next_choice[i] += 1
        row = choose(p, i, choice, devices)
        load[i + 1] = load[i]
        for k in range(p.row_parts[row]):
            d = devices[k]
            at = p.seconds_first[row] + k
            load[i + 1, d] += p.seconds[p.device_kind[d], at, 0] + p.seconds[p.device_kind[d], at, 1]
        quickest(p, row, least[i])
        bound = max(load[i + 1].max(), (load[i + 1].sum() + rest[i + 1]) / D, path(p, least, forward, backward))
        if bound * SAFE > best[0]:
            continue
        if not has_room(p, s, i, row):
            return -1
        simulated += 1
        last = i == n - 1
        if attempt(p, s, i, row, devices, np.nextafter(best[0], 0.0) if last else np.inf) and s.cost[0] < best[0]:
            best[0] = s.cost[0]
            copy(best_row, s.row)
            for t in range(n * M):
                best_place[t // M, t % M] = s.task[t].place
        if not last:
            i += 1
            next_choice[i] = p.choice_first[p.row_first[i]]
    return simulated
