"""DAPPLE's estimate by hand and against the event time; its search against the same recursion without shortcuts."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import HybridStage, check, shape
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.dapple import DappleSearch, Part, dapple, latency, parts, pivot, plan_latency
from fxpipe.planning.hybrid.event_time import Problem, event_time
from fxpipe.planning.hybrid.simple_plans import one_each, whole
from tests.planning.hybrid.test_event_time import random_chain, random_stages, servers


def test_one_stage_has_its_last_backward():
    """The equation as printed would say 3 * 3 + 1 + 5 here."""
    assert latency([Part(1, 2, 5)], 4) == 3 * 3 + 1 + 2 + 5


def test_pivot_in_the_middle():
    line = [Part(1, 1, 0), Part(0.5, 0.5, 0), Part(2, 3, 1), Part(0.5, 0.5, 0), Part(1, 1, 9)]
    assert pivot(line, 5) == 2
    # warm-up 3.5, steady 4 * 5, end: the last stage's ring, 9 - 0.5, is later than the first stage's backward, 4.5
    assert latency(line, 5) == 3.5 + 20 + 8.5


def test_a_stage_that_is_hardly_longer_does_not_become_the_pivot():
    assert pivot([Part(1, 1.1, 0), Part(3, 3, 0), Part(1, 1, 0)], 2) == 1
    assert pivot([Part(1, 1.1, 0), Part(0.1, 0.1, 0), Part(1, 1, 0)], 2) == 2
    assert pivot([Part(1, 1.1, 0), Part(0.1, 0.1, 0), Part(1, 1, 0)], 9) == 0


def test_without_transfers_and_rings_the_estimate_of_an_even_pipeline_is_exact():
    chain = Chain("m", 1, tuple(Layer(str(i), 1, 2) for i in range(4)))
    problem = Problem(chain, servers(1, 4, 1, 1, 0), 8)
    stages = tuple(HybridStage(i, i + 1, (i,)) for i in range(4))
    assert plan_latency(problem, stages) == event_time(problem, stages) == 3 * 11


def plain_recursion(problem: Problem, devices: int) -> float:
    """The same state and score, on a flat network, with everything tried."""
    n, m = len(problem.chain), problem.micro_batches
    everything = tuple(range(devices))
    best = latency(parts(problem, [HybridStage(0, n, everything)]), m)
    best = min([best, *([_straight(problem, devices)] if devices <= n else [])])
    table: dict[tuple[int, int], tuple[float, list[HybridStage]]] = {(0, 0): (inf, [])}
    for j in range(n):
        for g in range(devices):
            if (j, g) not in table:
                continue
            prefix = table[j, g][1]
            for r in range(1, devices - g):
                for end in range(j + 1, n):
                    stage = HybridStage(j, end, everything[g : g + r])
                    rest = HybridStage(end, n, everything[g + r :])
                    score = latency(parts(problem, [*prefix, stage, rest]), m)
                    best = min(best, score)
                    if score < table.get((end, g + r), (inf, []))[0]:
                        table[end, g + r] = (score, [*prefix, stage])
    return best


def _straight(problem: Problem, devices: int) -> float:
    """Only where each layer has a device is there no choice."""
    if devices < len(problem.chain):
        return inf
    return latency(parts(problem, [HybridStage(i, i + 1, (i,)) for i in range(devices)]), problem.micro_batches)


@pytest.mark.parametrize("seed", range(30))
def test_the_recursion(seed, monkeypatch):
    """Equal to the plain one where no prefix is given up. Giving up those that cannot win makes room for others, so
    that other plans may be found then, better or worse."""
    monkeypatch.setattr(DappleSearch, "_hopeless", lambda self, bound: False)
    rng = random.Random(seed)
    n, g = rng.randint(3, 9), rng.randint(2, 4)
    problem = Problem(random_chain(rng, n), servers(g, 1, 1.0, rng.uniform(2e8, 5e9), 0), rng.choice([1, 2, 8]))
    plan = dapple(problem)
    check(plan, n, g)
    found = plan_latency(problem, plan.stages)
    plain = plain_recursion(problem, g)
    # the even pipeline that `dapple` also tries may beat the recursion
    assert found == pytest.approx(plain, rel=1e-12) or (found < plain and shape(plan.stages) == "straight")


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_below_the_estimate(seed):
    """Of any plan, for each of its prefixes."""
    rng = random.Random(seed)
    problem = Problem(random_chain(rng, 9), servers(5, 1, 1.0, rng.uniform(2e8, 5e9), 0), rng.choice([1, 2, 8, 32]))
    for _ in range(20):
        stages = random_stages(rng, 9, 5)
        seconds, line, steady = plan_latency(problem, stages), parts(problem, stages), problem.micro_batches - 1
        head, work = line[0].forward + line[0].backward, DappleSearch(problem).work
        assert steady * max(part.forward + part.backward for part in line) + head <= seconds * (1 + 1e-12)
        for stage in stages:
            devices = sum(len(after.devices) for after in stages if after.first >= stage.first)
            assert steady * (work[-1] - work[stage.first]) / devices + head <= seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_never_above_data_parallelism_by_its_own_estimate(seed):
    rng = random.Random(seed)
    problem = Problem(random_chain(rng, 8), servers(2, 3, 2e10, 1e9, 1e-5), 8)
    whole = (HybridStage(0, 8, tuple(range(6))),)
    plan = dapple(problem)
    check(plan, 8, 6)
    assert plan_latency(problem, plan.stages) <= plan_latency(problem, whole)


def test_plans_fit_in_memory():
    chain = Chain("m", 1, tuple(Layer(str(i), 1, 1, parameters=40, saved=1, cut=1) for i in range(4)))
    roomy = Problem(chain, servers(1, 2, 1e3, 1e3, 0, memory=1000), 8, copies=2)
    assert shape(dapple(roomy).stages) == "DP" or event_time(roomy, dapple(roomy).stages) < inf
    tight = Problem(chain, servers(1, 2, 1e3, 1e3, 0, memory=170), 8, copies=2)
    assert [stage.end for stage in dapple(tight).stages] == [2, 4]
    assert event_time(tight, dapple(tight).stages) < inf
    with pytest.raises(PlanError, match="no plan of m fits"):
        dapple(Problem(chain, servers(1, 2, 1e3, 1e3, 0, memory=150), 8, copies=2))


def test_goes_on_after_an_interruption():
    """Stopped at every step, it begins with simple plans, and finds what it finds in one go."""
    for seed in range(3):
        rng = random.Random(seed)
        problem = Problem(random_chain(rng, 7), servers(2, 2, 1e10, rng.uniform(1e8, 1e9), 0), 8)
        search = DappleSearch(problem)
        assert not search.run(until=0.0)
        assert search.stages in (whole(problem), one_each(problem))
        steps = 1
        while not search.run(until=0.0):
            steps += 1
        assert steps > 10
        assert search.stages == dapple(problem).stages


def test_stages_that_fit_nowhere_may_recompute():
    """Each layer keeps 100 bytes of a micro-batch, and takes 1: no device has room for more than one layer's 100."""
    chain = Chain("m", 1, tuple(Layer(str(i), 1, 1, parameters=1, saved=100, cut=1) for i in range(4)))
    problem = Problem(chain, servers(1, 2, 1e3, 1e3, 0, memory=150), 8, copies=2)
    with pytest.raises(PlanError, match="no plan of m fits"):
        dapple(problem)
    search = DappleSearch(problem, recomputes=True)
    assert search.run()
    assert search.lacked
    assert search.stages == dapple(replace(problem, capped=False)).stages
