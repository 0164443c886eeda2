"""Plans for devices that are not alike, against all plans there are."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest

from fxpipe.ir.plan.hybrid_plan import check
from fxpipe.ir.plan.layer_chain import Chain, Layer, beside, slower
from fxpipe.planning.hybrid.event_time import Problem, event_time, least_work
from fxpipe.planning.hybrid.exact import lagrangian_bound as dual
from fxpipe.planning.hybrid.exact.device_symmetry import runs
from fxpipe.planning.hybrid.exact.relaxed_cluster import Relaxed, rates
from fxpipe.planning.hybrid.exact.relaxed_ways import RelaxedWays
from fxpipe.planning.hybrid.plan_request import Request
from fxpipe.planning.hybrid.planners import PLANNERS, search
from tests.helpers.marks import mostly_slow
from tests.planning.hybrid.exact.test_optimal_plan import LAYOUTS, all_stages, compare, instance, plan_for
from tests.planning.hybrid.test_event_time import on_unequal, random_chain, servers


def unequal(seed: int, layers: int, devices: int):
    problem, network, memory = instance(seed, layers, devices)
    rng = random.Random(seed)
    g = len(problem.cluster.devices)
    return replace(problem, chain=on_unequal(rng, problem.chain, g)), network, memory


@pytest.mark.parametrize("seed", mostly_slow(range(200), lambda seed: seed < 6))
def test_equals_brute_force(seed):
    compare(*unequal(seed, layers=6, devices=4))


@pytest.mark.parametrize("seed", mostly_slow(range(60), lambda seed: seed < 4))
def test_bounds_hold(seed):
    problem, _, _ = unequal(seed, layers=5, devices=4)
    g = len(problem.cluster.devices)
    best = min(event_time(problem, stages) for stages in all_stages(len(problem.chain), g))
    assert least_work(problem) <= best * (1 + 1e-9)
    groups = runs(problem.cluster, problem.kinds)
    bound, _ = dual.search(
        RelaxedWays((Relaxed(problem, rates(problem, groups), False),), (1,), g), 0.0, 10.0, steps=20
    )
    assert bound <= min(best, 10.0) * (1 + 1e-9)


@pytest.mark.parametrize("seed", mostly_slow(range(20), lambda seed: seed < 2))
def test_no_planner_is_faster_than_the_optimal_one(seed):
    rng = random.Random(seed)
    count, each = rng.choice(LAYOUTS)
    chain = on_unequal(rng, random_chain(rng, 6), count * each)
    cluster = servers(count, each, 1e10, 10 ** rng.uniform(8, 10), 1e-5)
    request = Request((chain,), cluster, chain.batch * 4, seconds=5, capped=False)
    best = search("optimal", request)
    for planner in PLANNERS:
        answer = search(planner, request)
        check(answer.plan, 6, count * each)
        assert best.seconds <= answer.seconds * (1 + 1e-9)
        assert best.certificate.bound <= answer.seconds * (1 + 1e-9)


V100S_AND_K80S = ("V100:0", "V100:1", "K80:0", "K80:1")


def mixed(order: tuple[str, ...]) -> tuple[Chain, Problem]:
    own = Chain("m", 4, (Layer("a", 1, 2, 10, 10, 1e-3), Layer("b", 1, 2, 10, 10)))
    chain = beside(own, {"K80": slower(own, 4.0)})
    cluster = servers(1, 4, 1e9, 1e9, 0)
    cluster = replace(
        cluster,
        devices=tuple(replace(d, label=name) for d, name in zip(cluster.devices, order, strict=True)),
        switches=(replace(cluster.switches[0], members=order),),
    )
    return chain, Problem(chain, cluster, 4)


def test_slow_devices_are_left_out_where_they_only_hold_up():
    """Of 4 samples a K80 takes 6 s for one, and a V100 3 s for two: four devices need 24 s for 4 micro-batches, two
    V100s 12 s."""
    for order in list(permutations(V100S_AND_K80S))[::5]:
        _, problem = mixed(order)
        found = plan_for(problem)
        used = {order[device] for stage in found.plan.stages for device in stage.devices}
        assert used == {"V100:0", "V100:1"}
        assert found.certificate.proven
        assert found.seconds == pytest.approx(12.0, rel=1e-6)


def test_kinds_that_are_neighbours_are_counted():
    _, problem = mixed(V100S_AND_K80S)
    assert runs(problem.cluster, problem.kinds) == ((0, 1), (2, 3))
    _, problem = mixed(("V100:0", "K80:0", "V100:1", "K80:1"))
    assert runs(problem.cluster, problem.kinds) == ((0,), (1,), (2,), (3,))


def test_the_first_replica_has_the_larger_share():
    """Of 5 samples the first replica has 3: as the fast one it takes 3 x 0.25 s forward, the slow one 2 x 1 s."""
    own = Chain("m", 5, (Layer("a", 1.25, 2.5),))
    chain = beside(own, {"g1": slower(own, 4.0)})
    cluster = servers(1, 2, 1e9, 1e9, 0)
    assert Problem(chain, cluster, 1).stage(0, 1, (0, 1)).forward == pytest.approx(2.0)
    swapped = beside(own, {"g0": slower(own, 4.0)})
    assert Problem(swapped, cluster, 1).stage(0, 1, (0, 1)).forward == pytest.approx(3.0)
    alone = replace(own, batch=1)
    assert Problem(beside(alone, {"g1": slower(alone, 4.0)}), cluster, 1).stage(0, 1, (0, 1)).forward == 1.25
