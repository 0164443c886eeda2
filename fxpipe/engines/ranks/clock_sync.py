"""How far the clocks of ranks are apart, so that what each has noted becomes one timeline.

    leader  before ──┐                 ┌── after        the other clock was read between the two, half way with luck;
    rank 1           └──▶ its time ────┘                the quickest of several rounds leaves it the least room

Processes of one machine have the same clock, and a round only says that they may: then they count as the same, which is
exact. Those of two machines began at different times.
"""

from __future__ import annotations

import pickle
from time import perf_counter

from .rank_group import LEADER, World

ROUNDS = 10


def ahead(world: World) -> float:
    """Seconds by which this rank's clock is ahead of the leader's. All ranks call it together. Raises Lost."""
    if world.leads:
        for peer in world.others:
            world.tell(peer, pickle.dumps(difference([_round(world, peer) for _ in range(ROUNDS)])))
        return 0.0
    for _ in range(ROUNDS):
        world.hear(LEADER)
        world.tell(LEADER, pickle.dumps(perf_counter()))
    found: float = pickle.loads(world.hear(LEADER))
    return found


def _round(world: World, peer: int) -> tuple[float, float, float]:
    before = perf_counter()
    world.tell(peer, b"")
    there: float = pickle.loads(world.hear(peer))
    return before, there, perf_counter()


def difference(rounds: list[tuple[float, float, float]]) -> float:
    """By how much a clock is ahead of ours, from several readings: our time before, its time, our time after.

    >>> difference([(0.0, 100.5, 4.0), (5.0, 106.0, 7.0)])
    100.0
    >>> difference([(0.0, 0.75, 1.0)])
    0.0
    """
    before, there, after = min(rounds, key=lambda one: one[2] - one[0])
    return 0.0 if before <= there <= after else there - (before + after) / 2
