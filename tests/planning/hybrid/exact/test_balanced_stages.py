"""Balanced stages against all cuts that there are."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise
from math import inf

import pytest

from fxpipe.ir.plan.hybrid_plan import HybridStage, warmup_of
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.event_time import Problem, fits
from fxpipe.planning.hybrid.exact.balanced_stages import CLOSE, balanced, in_order
from tests.planning.hybrid.exact.test_optimal_plan import instance
from tests.planning.hybrid.exact.test_unequal_devices import unequal
from tests.planning.hybrid.test_event_time import servers


def slowest(problem: Problem, ends: tuple[int, ...], devices: tuple[int, ...], recompute: bool | None) -> float:
    """The seconds of the slowest stage, inf if one does not fit."""
    worst, k = 0.0, len(ends)
    places = list(accumulate(devices, initial=0))
    for s, (first, end) in enumerate(pairwise((0, *ends))):
        ahead = warmup_of(problem.warmup, s, k, problem.micro_batches)
        own = tuple(range(places[s], places[s + 1]))
        ways = [
            problem.stage(first, end, own, again) for again in ((False, True) if recompute is None else (recompute,))
        ]
        worst = max(
            worst, min((t.forward + t.again + t.backward for t in ways if t.held(ahead) <= t.room), default=inf)
        )
    return worst


@pytest.mark.parametrize("make", [instance, unequal])
@pytest.mark.parametrize("recompute", [False, None])
def test_no_cuts_have_a_faster_slowest_stage(make, recompute):
    found = 0
    for seed in range(60):
        problem = make(seed, 7, 5)[0]
        n, rng = len(problem.chain), random.Random(seed)
        k = rng.randint(1, min(n, len(problem.cluster.devices)))
        devices = (1 + rng.randint(0, len(problem.cluster.devices) - k), *(1,) * (k - 1))
        best = min(slowest(problem, (*cuts, n), devices, recompute) for cuts in combinations(range(1, n), k - 1))
        one = balanced(problem, in_order(devices), recompute)
        if one is None:
            assert recompute is None or best == inf
            continue
        own = slowest(problem, one.ends, devices, recompute)
        assert own <= one.seconds * (1 + 1e-9)
        assert own >= best * (1 - 1e-9)
        if recompute is False:  # else what a stage takes also counts, and that is not less in a smaller stage
            assert own <= best * CLOSE * (1 + 1e-9)
        found += 1
    assert found > 30


def test_a_stage_with_less_memory_for_its_layers_has_fewer():
    chain = Chain("m", 1, tuple(Layer(str(i), 1.0, 2.0, saved=1e6) for i in range(8)))
    problem = Problem(chain, servers(1, 3, 1e12, 1e12, 0.0, memory=6 * 10**6), 8)
    one = balanced(problem, in_order((1, 1, 1)), False)
    assert one is not None
    assert one.ends == (2, 5, 8)
    assert one.seconds == pytest.approx(9.0, rel=CLOSE - 1)
    stages = [HybridStage(a, b, (s,)) for s, (a, b) in enumerate(pairwise((0, *one.ends)))]
    assert fits(problem, stages)
    assert balanced(problem, in_order((1,)), False) is None
