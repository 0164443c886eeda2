"""Compiled: the steps of a Markov chain over strategies after Metropolis and Hastings, as in the SOAP paper: draw an
operator and a config for it, keep the change if the step got faster, and with probability
exp(-(slower by) / temperature) if it got slower. The chain itself is `block_moves.explore`.

The random number of this decision is drawn before the simulation, so that a proposal is given up as soon as it is sure
to be too slow.
"""

from __future__ import annotations

import numpy as np

from .delta_simulation import attempt, simulate_all
from .flat_arrays import Ints, Problem, State
from .graph_update import build, compact, room
from .numba_compiler import compiled, entry


@compiled
def uniform(random: Ints) -> float:
    """A random number in [0, 1): xorshift64*; its state is one word, which is not 0."""
    x = np.uint64(random[0])
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = np.int64(x)
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0


@compiled
def row_of(p: Problem, i: int, choice: int) -> int:
    """The row of a choice of operator i; `choice` counts the choices of all operators."""
    low, high = p.row_first[i], p.row_first[i + 1] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if p.choice_first[middle] <= choice:
            low = middle
        else:
            high = middle - 1
    return int(low)


@compiled
def choose(p: Problem, i: int, choice: int, devices: Ints) -> int:
    """The row of a choice; `devices` are filled with those of its parts."""
    row = row_of(p, i, choice)
    for k in range(p.row_parts[row]):
        devices[k] = choice - p.choice_first[row] + k
    return row


@compiled
def below(random: Ints, n: int) -> int:
    """A random one of 0 .. n - 1."""
    return int(uniform(random) * n)


@compiled
def propose(p: Problem, random: Ints, devices: Ints) -> tuple[int, int]:
    """Draw an operator, and the row of a config for it; `devices` are filled with those of its parts."""
    i = below(random, p.n)
    first, after = p.choice_first[p.row_first[i]], p.choice_first[p.row_first[i + 1]]
    return i, choose(p, i, first + below(random, after - first), devices)


@compiled
def threshold(seconds: float, temperature: float, random: Ints) -> float:
    """Draw the most seconds with which a change is kept, if the step now takes `seconds`."""
    return float(seconds - temperature * np.log(1.0 - uniform(random)))


@compiled
def has_room(p: Problem, s: State, i: int, row: int) -> bool:
    """Whether the messages of a changed operator fit behind those in use, after compaction if necessary."""
    more = room(p, s, i, row)
    if s.top[0] + more > len(s.message):
        compact(p, s)
    return bool(s.top[0] + more <= len(s.message))


@entry
def begin(p: Problem, s: State, rows: Ints, devices: Ints) -> bool:
    """Build and simulate a strategy, from which changes start. False if there is no room for all messages."""
    if not build(p, s, rows, devices):
        return False
    simulate_all(p, s)
    return True


@entry
def improve(p: Problem, s: State, i: int, devices: Ints) -> int:
    """Give operator i the config with which the step is fastest. Returns 1 if that is a new one, 0 if it had it before,
    -1 if there was no room for messages."""
    found = 0
    for choice in range(p.choice_first[p.row_first[i]], p.choice_first[p.row_first[i + 1]]):
        row = choose(p, i, choice, devices)
        if not has_room(p, s, i, row):
            return -1
        if attempt(p, s, i, row, devices, np.nextafter(s.cost[0], 0.0)):
            found = 1
    return found
