"""Plans whose stages cut their ops in different ways: the search against all plans there are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_groups import grouped, positions
from fxpipe.ir.cluster.network import hand_over
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, check, warmup_of
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.event_time import step_time
from fxpipe.planning.hybrid.exact import lagrangian_bound as dual
from fxpipe.planning.hybrid.exact import lower_bound as bounds
from fxpipe.planning.hybrid.exact.optimal_plan import optimal
from fxpipe.planning.hybrid.exact.search_phases import cases_of
from fxpipe.planning.hybrid.plan_request import Request, RequestWay
from fxpipe.schedules.simulate.hybrid_costs import order_of, simulate_hybrid
from tests.helpers.marks import mostly_slow
from tests.planning.hybrid.exact.test_optimal_plan import all_stages
from tests.planning.hybrid.test_event_time import random_chain, servers


def shared(rng: random.Random, chain: Chain, degree: int) -> Chain:
    """What a device of a group has of the layers: more or less than its part."""
    layers = (
        replace(
            one,
            forward=one.forward / degree * rng.uniform(1, 1.8),
            backward=one.backward / degree * rng.uniform(1, 1.8),
            parameters=one.parameters / degree * rng.uniform(1, 1.5),
            saved=one.saved / degree * rng.uniform(0.8, 1.5),
            cut=one.cut / rng.choice([1, degree]),
        )
        for one in chain.layers
    )
    return replace(chain, layers=tuple(layers))


def instance(seed: int) -> Request:
    """Two to four layers on up to four devices, with one to five ways."""
    rng = random.Random(seed)
    count, each = rng.choice([(1, 2), (1, 4), (2, 2), (2, 1), (1, 3)])
    chain = replace(random_chain(rng, rng.randint(2, 4)), batch=rng.randint(1, 6), ideal_shares=False)
    copies, m = rng.choice([0, 1, 3]), rng.choice([1, 2, 3, 6])
    need = max(copies * layer.parameters + layer.saved for layer in chain.layers)
    memory = rng.choice([10**18, int(need * rng.uniform(0.5, 3)) + 1, int(need * rng.uniform(2, 8)) + 1])
    cluster = servers(count, each, rng.uniform(1e10, 1e11), 10 ** rng.uniform(8, 10), rng.choice([0.0, 1e-4]), memory)
    degrees = [1, *(d for d in (2, 4) if d <= each), *rng.choices([d for d in (1, 2, 4) if d <= each], k=2)]
    ways = [RequestWay(d, (shared(rng, chain, d),), grouped(cluster, d)) for d in degrees]
    return Request(
        ways[0].chains, cluster, int(chain.batch) * m, m, rng.choice(["early", "late"]),
        all_reduce=rng.choice(["end", "overlap"]), copies=copies, seconds=20, ways=tuple(ways),
        recompute=rng.choice([False, None]), optimizer_sharding=rng.choice(["none", "zero1"]),
    )  # fmt: skip


def slower_with_less_memory(rng: random.Random, chain: Chain) -> Chain:
    """Another cut of the same ops, for which a byte has had a price."""
    layers = []
    for one in chain.layers:
        time, less = rng.uniform(1, 1.6), rng.uniform(0.3, 1)
        times = {"forward": one.forward * time, "backward": one.backward * rng.uniform(1, time)}
        bytes = {"parameters": one.parameters * less, "saved": one.saved * rng.uniform(less, 1)}
        layers.append(replace(one, cut=one.cut * rng.choice([0.5, 1, 2]), **times, **bytes))
    return replace(chain, layers=tuple(layers))


def priced_instance(seed: int) -> Request:
    """Two or three layers on two or four devices, with one to three cuts of ops for each size, and a limit of memory
    between what these need."""
    rng = random.Random(seed)
    count, each = rng.choice([(1, 2), (1, 2), (2, 2)])
    chain = replace(random_chain(rng, rng.randint(2, 3)), batch=rng.randint(1, 6), ideal_shares=False)
    copies, m = rng.choice([1, 3]), rng.choice([1, 2, 3, 6])
    sizes = rng.choice([(1, 2), (2,), (2, 1)])
    made: dict[int, list[Chain]] = {}
    for size in sizes:
        made[size] = [shared(rng, chain, size) if size > 1 else chain]
        made[size] += [slower_with_less_memory(rng, made[size][0]) for _ in range(rng.randint(0, 2) if size > 1 else 0)]
    held = sorted(copies * one.parameters[-1] + one.saved[-1] for own in made.values() for one in own)
    memory = int(rng.uniform(held[0] / 2, held[-1] * 1.1)) + 1
    cluster = servers(count, each, rng.uniform(1e10, 1e11), 10 ** rng.uniform(8, 10), rng.choice([0.0, 1e-4]), memory)
    first = [RequestWay(size, (own[0],), grouped(cluster, size)) for size, own in made.items()]
    more = [RequestWay(size, (one,), grouped(cluster, size)) for size, own in made.items() for one in own[1:]]
    return Request(
        first[0].chains, cluster, int(chain.batch) * m, m, rng.choice(["early", "late"]), copies=copies, seconds=20,
        ways=(*first, *more), recompute=rng.choice([False, None]),
    )  # fmt: skip


def plans(request: Request) -> Iterator[tuple[HybridStage, ...]]:
    """Every plan of this many layers, by name of devices."""
    again = (False, True) if request.recompute is None else (False,)
    for stages in all_stages(len(request.chains[0]), len(request.cluster.devices), again):
        choices = []
        for stage in stages:
            fitting = []
            for at, way in enumerate(request.ways):
                try:
                    positions(request.cluster, way.degree, stage.devices)
                except ValueError:
                    continue
                fitting.append(replace(stage, tensor_parallel=way.degree, way=at))
            choices.append(fitting)
        yield from product(*choices)


def seconds(request: Request, stages: tuple[HybridStage, ...], limit: float = inf) -> float:
    """Of a step, from costs of stages and transfers; inf if it does not fit in memory."""
    assert request.micro_batches
    assert request.warmup
    m, n = request.micro_batches, len(stages)
    problems = known(request)
    costs = [
        problems[e.way].stage(e.first, e.end, at(request.cluster, e), e.recompute)
        for e in stages
    ]  # fmt: skip
    ahead = [warmup_of(request.warmup, s, n, m) for s in range(n)]
    if any(cost.held(k) > cost.room for cost, k in zip(costs, ahead, strict=True)):
        return inf
    hops = [hop(request, a, b) for a, b in pairwise(stages)]
    return step_time(costs, ahead, [there for there, _ in hops], [0.0, *(back for _, back in hops)], m, limit)


KNOWN: dict[int, object] = {}


def known(request: Request):
    if KNOWN.get(0) is not request:
        KNOWN.clear()
        KNOWN[0], KNOWN[1] = request, request.problems(request.micro_batches, request.warmup)
    return KNOWN[1]


def at(cluster: Cluster, stage: HybridStage) -> tuple[int, ...]:
    key = stage.devices, stage.tensor_parallel
    if key not in KNOWN:
        KNOWN[key] = positions(cluster, stage.tensor_parallel, stage.devices)
    return KNOWN[key]


def hop(request: Request, a: HybridStage, b: HybridStage) -> tuple[float, float]:
    key = a.devices, a.tensor_parallel, b.devices, b.tensor_parallel
    chain = known(request)[b.way].chain
    if key not in KNOWN:
        KNOWN[key] = hand_over(request.cluster, a.groups, b.groups, chain.samples)
    there, back = KNOWN[key]
    return there.seconds(chain.cuts[b.first]), back.seconds(chain.cuts[b.first])


def compare(request: Request) -> HybridPlan | None:
    """The plan, if there is one."""
    best = inf
    for stages in plans(request):
        best = min(best, seconds(request, stages, best))
    (case,) = cases_of(request)
    made = bounds.tables(case.relaxed, case.parts, inf, inf)
    assert made.total <= best * (1 + 1e-9)
    low, _ = dual.search(case.relaxed, 0.0, 100.0, steps=20)
    assert low <= min(best, 100.0) * (1 + 1e-9)
    assert case.relaxed.least_work <= best * (1 + 1e-9)
    if best == inf:
        with pytest.raises(PlanError, match="no plan found that fits in memory"):
            optimal(request)
        return None
    found = optimal(request)
    check(found.plan, len(request.chains[0]), len(request.cluster.devices))
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.certificate is not None
    assert found.certificate.proven
    assert seconds(request, found.plan.stages) == pytest.approx(found.seconds, rel=1e-12)
    chains = [one.chain for one in known(request)]
    order = order_of("1f1b" if request.warmup == "early" else "1f1b-late", found.plan)
    line = simulate_hybrid(chains, request.cluster, found.plan, order, request.copies)
    assert line.makespan == pytest.approx(found.seconds, rel=1e-9)
    assert all(held <= request.cluster.devices[0].memory * (1 + 1e-9) + 2 for held in line.high_water)
    return found.plan


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(seed: int) -> None:
    compare(instance(seed))


@pytest.mark.parametrize("start", mostly_slow(range(0, 600, 100), lambda start: start < 100))
def test_cuts_for_a_price_equal_brute_force(start: int) -> None:
    """Where memory is short, plans have cuts that are slower and hold less."""
    needed = 0
    for seed in range(start, start + 100):
        request = priced_instance(seed)
        plan = compare(request)
        fastest = len({way.degree for way in request.ways})
        needed += plan is not None and any(stage.way >= fastest for stage in plan.stages)
    assert needed >= 10


def test_a_layer_that_no_device_holds_is_shared_and_the_others_are_not() -> None:
    layers = (Layer("wide", 0.02, 0.04, 6e8, 0, 1e5), Layer("deep", 0.01, 0.02, 1e6, 0, 1e5))
    alone = Chain("m", 2, layers)
    halves = (
        replace(layers[0], forward=0.011, backward=0.022, parameters=3e8),
        replace(layers[1], forward=0.015, backward=0.03),
    )
    cluster = servers(1, 4, 1e11, 1e10, 0.0, memory=10**9)
    ways = tuple(
        RequestWay(degree, (chain,), grouped(cluster, degree))
        for degree, chain in ((1, alone), (2, replace(alone, layers=halves)))
    )
    found = optimal(Request((alone,), cluster, 16, 8, "early", copies=2, ways=ways))
    assert [(stage.tensor_parallel, stage.replicas) for stage in found.plan.stages] == [(2, 1), (1, 2)]
    assert found.plan.stages[0].devices == (0, 1)
    assert found.certificate is not None
    assert "with a tensor-parallel size of 1, 2 for each stage" in str(found.certificate)
    with pytest.raises(PlanError, match="no plan found that fits in memory"):
        optimal(Request((alone,), cluster, 16, 8, "early", copies=2))
