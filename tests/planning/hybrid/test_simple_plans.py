"""Data parallelism, and plain pipelines against trying all cuts."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import shape
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.event_time import Problem, event_time, fits
from fxpipe.planning.hybrid.plan_request import Request
from fxpipe.planning.hybrid.planners import search
from fxpipe.planning.hybrid.simple_plans import gpipe, least_variance, one_each, whole
from tests.planning.hybrid.test_event_time import servers

CHAIN = Chain("m", 8, tuple(Layer(str(i), 1, 2, parameters=10, saved=40, cut=8) for i in range(4)))


def problem_of(costs, devices):
    chain = Chain("m", 1, tuple(Layer(str(i), cost / 3, cost - cost / 3) for i, cost in enumerate(costs)))
    return Problem(chain, servers(1, devices, 1e3, 1e3, 0), 4)


def every_cut(costs, blocks):
    for inner in combinations(range(1, len(costs)), blocks - 1):
        yield [sum(costs[a:b]) for a, b in pairwise((0, *inner, len(costs)))]


def blocks_of(costs, stages):
    return [sum(costs[stage.first : stage.end]) for stage in stages]


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all(seed):
    rng = random.Random(seed)
    costs = [rng.choice([0, 1, 2, 5, rng.random()]) for _ in range(rng.randint(1, 10))]
    k = rng.randint(1, len(costs))
    problem = problem_of(costs, k)
    assert max(blocks_of(costs, one_each(problem))) == pytest.approx(min(map(max, every_cut(costs, k))))
    found = sum(block**2 for block in blocks_of(costs, gpipe(problem)))
    assert found == pytest.approx(min(sum(block**2 for block in blocks) for blocks in every_cut(costs, k)))


def test_more_devices_than_layers():
    for plan in (one_each, gpipe):
        with pytest.raises(PlanError, match="m has 2 layers: they cannot be cut into 3 stages"):
            plan(problem_of([1.0, 2.0], 3))


def test_many_layers():
    """As many as the largest U-Net of torchgpipe has, in 8 blocks."""
    costs = [1.0 + i % 7 for i in range(2133)]
    assert sum(least_variance(costs, 8)) == one_each(problem_of(costs, 8))[-1].end == 2133


def test_a_device_for_each_stage():
    assert [stage.end for stage in one_each(problem_of([1, 1, 3, 2, 1], 3))] == [2, 3, 5]


def test_one_stage():
    problem = Problem(CHAIN, servers(1, 4, 1e3, 1e3, 0), 2)
    assert shape(whole(problem)) == "DP"
    assert event_time(problem, whole(problem)) == pytest.approx(2 * 12 / 4 + 2 * 3 / 4 * 40 / 1e3)


def test_micro_batches_that_fit():
    """A device keeps 80 bytes for parameters, and 20 bytes for each of its samples."""
    request = Request((CHAIN,), servers(1, 4, 1e3, 1e3, 0, memory=80 + 2 * 20), 32, recompute=False, copies=2)
    found = search("data parallel", request)
    assert found.plan.micro_batches >= 4  # of 2 samples each
    assert found.seconds == pytest.approx(32 / 8 * 12 / 4 + 0.06)


def test_what_does_not_fit():
    problem = Problem(CHAIN, servers(1, 4, 1e3, 1e3, 0, memory=60), 2)
    assert not fits(problem, whole(problem))
    assert not fits(problem, one_each(problem))
    with pytest.raises(PlanError, match="m does not fit in memory like that without recomputation"):
        search("data parallel", Request((CHAIN,), servers(1, 4, 1e3, 1e3, 0, memory=80), 32, recompute=False, copies=2))
