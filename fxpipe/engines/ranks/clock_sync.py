"""Measures the offsets between the clocks of ranks, so that their notes become one timeline.

    leader  before ──┐                 ┌── after        rank 1 read its clock between the two, about half way;
    rank 1           └──▶ its time ────┘                the shortest of several rounds has the smallest error

Processes on one machine have the same clock. If a round is consistent with equal clocks, the offset counts as 0, which
is exact there. The clocks of two machines count from different moments.
"""

from __future__ import annotations

import pickle
from time import perf_counter

from .rank_group import World
from .rendezvous import LEADER

ROUNDS = 10


def ahead(world: World) -> float:
    """The seconds by which this rank's clock is ahead of the leader's. All ranks call it together. Raises Lost."""
    if world.leads:
        for peer in world.others:
            world.tell(peer, data=pickle.dumps(difference([_round(world, peer) for _ in range(ROUNDS)])))
        return 0.0
    for _ in range(ROUNDS):
        world.hear(LEADER)
        world.tell(LEADER, data=pickle.dumps(perf_counter()))
    found: float = pickle.loads(world.hear(LEADER))
    return found


def _round(world: World, peer: int) -> tuple[float, float, float]:
    before = perf_counter()
    world.tell(peer, data=b"")
    there: float = pickle.loads(world.hear(peer))
    return before, there, perf_counter()


def difference(rounds: list[tuple[float, float, float]]) -> float:
    """The seconds by which another clock is ahead of ours. Each round is (our time before, its time, our time after).

    >>> difference([(0.0, 100.5, 4.0), (5.0, 106.0, 7.0)])
    100.0
    >>> difference([(0.0, 0.75, 1.0)])
    0.0
    """
    before, there, after = min(rounds, key=lambda one: one[2] - one[0])
    return 0.0 if before <= there <= after else there - (before + after) / 2
