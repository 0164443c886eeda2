"""The planner against all plans there are, on problems small enough to go through them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product
from math import inf

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.hybrid import HybridStage, check
from fxpipe.planning.event_time import Problem, event_time
from fxpipe.planning.optimal import Optimum, optimal
from tests.planning.test_event_time import random_chain, servers, slow_event_time

LAYOUTS = [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (1, 5), (5, 1)]  # servers, and devices in each


def all_stages(layers: int, devices: int, recompute: tuple[bool, ...] = (False,)) -> Iterator[tuple[HybridStage, ...]]:
    """Every plan, by name of devices: nothing is taken to be symmetric."""
    for k in range(1, min(layers, devices) + 1):
        for homes in product(range(-1, k), repeat=devices):
            groups = [tuple(d for d, home in enumerate(homes) if home == s) for s in range(k)]
            if not all(groups):
                continue
            for inner in combinations(range(1, layers), k - 1):
                ends = (0, *inner, layers)
                for again in product(recompute, repeat=k):
                    yield tuple(map(HybridStage, ends, ends[1:], groups, again))


def instance(seed: int, layers: int, devices: int):
    rng = random.Random(seed)
    count, each = rng.choice([layout for layout in LAYOUTS if layout[0] * layout[1] <= devices])
    network = (rng.uniform(1e10, 1e11), 10 ** rng.uniform(8, 10), rng.choice([0.0, 1e-4, 2e-3]))
    chain = random_chain(rng, rng.randint(1, layers))
    copies = rng.choice([0, 1, 3])
    need = max(copies * layer.parameters + layer.saved for layer in chain.layers)
    memory = rng.choice([10**18, int(need * rng.uniform(0.8, 4)) + 1, int(need * rng.uniform(2, 12)) + 1])
    cluster = servers(count, each, *network, memory=memory)
    problem = Problem(
        chain,
        cluster,
        rng.choice([1, 2, 3, 4, 6, 9]),
        rng.choice(["early", "late"]),
        rng.choice(["end", "overlap"]),
        copies,
        memory < 10**18,
    )
    return problem, (each, *map(Fraction, network)), memory


def plan_for(problem: Problem, **choices) -> Optimum:
    fixed = {
        "micro_batches": problem.micro_batches,
        "warmup": problem.warmup,
        "all_reduce": problem.all_reduce,
        "copies": problem.copies,
        "capped": problem.capped,
        "recompute": False,
    }
    batch = problem.chain.batch * problem.micro_batches
    return optimal(problem.chain, problem.cluster, batch, **{**fixed, **choices})


def compare(seed: int, layers: int, devices: int) -> None:
    problem, network, memory = instance(seed, layers, devices)
    n, g = len(problem.chain), len(problem.cluster.devices)
    best = inf
    for stages in all_stages(n, g):
        best = min(best, event_time(problem, stages, best))
    if best == inf:
        with pytest.raises(PlanError, match="no plan found that fits in memory"):
            plan_for(problem)
        return
    found = plan_for(problem)
    check(found.plan, n, g)
    assert found.time == pytest.approx(best, rel=1e-9)
    assert found.certificate.proven, (seed, found)
    assert event_time(problem, found.plan.stages) == pytest.approx(found.time, rel=1e-12)
    m = problem.micro_batches
    fixed = (m, problem.warmup, problem.all_reduce, network, problem.copies, memory if problem.capped else inf)
    slow = slow_event_time(problem.chain, found.plan.stages, *fixed)
    assert found.time == pytest.approx(float(slow), rel=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    compare(seed, layers=6, devices=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1500))
def test_equals_brute_force_on_larger_problems(seed):
    compare(seed, layers=8, devices=5)
