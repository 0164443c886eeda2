"""Plans with several stages on each device against all their candidates, and their bounds against all cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, check
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.pipe.results.find_plan import find_plan, looped_order
from fxpipe.planning.hybrid import looped_pipeline
from fxpipe.planning.hybrid.event_time import Problem
from fxpipe.planning.hybrid.looped_pipeline import LoopedOrder, looped
from fxpipe.planning.hybrid.plan_request import Answer, Request
from fxpipe.schedules.make_schedule import LOOPED
from tests.planning.hybrid.exact.test_optimal_plan import instance
from tests.planning.hybrid.exact.test_unequal_devices import unequal
from tests.planning.hybrid.test_event_time import servers

CHAIN = Chain("m", 4, tuple(Layer(str(i), 1 + i % 3, 2, parameters=10 + 30 * i, saved=40, cut=8) for i in range(8)))
CLUSTER = servers(2, 2, 1e3, 1e2, 0)


def request_of(problem: Problem, **choices: object) -> Request:
    given = {"copies": problem.copies, "capped": problem.capped, "all_reduce": problem.all_reduce, **choices}
    m = problem.micro_batches
    return Request((problem.chain,), problem.cluster, round(m * problem.chain.batch), m, **given)


def every(problem: Problem, order: LoopedOrder, schedule: str) -> Iterator[HybridPlan]:
    """All cuts, with all choices of recomputation, for the numbers of stages and replicas that there are."""
    n, g = len(problem.chain), len(problem.cluster.devices)
    for replicas, times in product(range(1, g // 2 + 1), order.per_device):
        homes = order.place(g // replicas, times)
        groups = [tuple(range(at * replicas, (at + 1) * replicas)) for at in homes]
        for cuts in combinations(range(1, n), len(homes) - 1):
            for again in (False, True):
                ends = pairwise((0, *cuts, n))
                stages = tuple(HybridStage(a, b, own, again) for (a, b), own in zip(ends, groups, strict=True))
                yield HybridPlan(
                    problem.chain.model, stages, problem.micro_batches, all_reduce=problem.all_reduce,
                    samples=problem.chain.samples,
                )  # fmt: skip


def room(problem: Problem) -> float:
    return min(device.memory for device in problem.cluster.devices) if problem.capped else inf


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_below_the_bound(seed: int) -> None:
    problem, _, _ = (unequal if seed % 2 else instance)(seed, 6, 4)
    schedule = LOOPED[seed % len(LOOPED)]
    order = looped_order(schedule, 2)
    plans = [(order.simulate(problem, plan), plan) for plan in every(problem, order, schedule)]
    fitting = [seconds for (seconds, held), _ in plans if max(held) <= room(problem)]
    try:
        answer = looped(request_of(problem), order)
    except PlanError:
        assert not plans or len(fitting) < len(plans)
        return
    assert answer.certificate is not None
    assert answer.certificate.bound <= min(fitting, default=inf) * (1 + 1e-9)
    assert answer.seconds == order.simulate(problem, answer.plan)[0]
    assert max(order.simulate(problem, answer.plan)[1]) <= room(problem)
    check(answer.plan, len(problem.chain), len(problem.cluster.devices))


def asked(schedule: str, **choices: object) -> Answer:
    return find_plan("optimal", Request((CHAIN,), CLUSTER, 16, **choices), schedule)


@pytest.mark.parametrize("schedule", LOOPED)
def test_the_fastest_of_all_candidates(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    best = asked(schedule)
    monkeypatch.setattr(looped_pipeline, "_bound", lambda problem, stages: 0.0)
    all_of_them = asked(schedule)
    assert best.seconds == all_of_them.seconds
    assert best.certificate is not None
    assert all_of_them.certificate is not None
    assert best.certificate.simulated < all_of_them.certificate.simulated


def test_devices_that_lack_memory_recompute() -> None:
    free = asked("interleaved", micro_batches=8)
    order = looped_order("interleaved")
    most = max(order.simulate(Request((CHAIN,), CLUSTER, 16).problem(8, "early"), free.plan)[1])
    devices = tuple(replace(device, memory=int(most) - 1) for device in CLUSTER.devices)
    small = Request((CHAIN,), replace(CLUSTER, devices=devices), 16, 8)
    tight = find_plan("optimal", small, "interleaved")
    assert tight.seconds > free.seconds
    assert max(order.simulate(small.problem(8, "early"), tight.plan)[1]) < most
    devices = tuple(replace(device, memory=10) for device in CLUSTER.devices)
    with pytest.raises(PlanError, match="fits in memory without recomputation with several stages on each device"):
        find_plan("optimal", replace(small, cluster=replace(CLUSTER, devices=devices), recompute=False), "interleaved")


def test_zero_comes_before_recomputation() -> None:
    layers = tuple(Layer(str(i), 1, 2, parameters=100, saved=4, cut=8) for i in range(8))
    chain, order = Chain("m", 4, layers), looped_order("zb-v")
    needs = {
        sharding: order.simulate(one.problem(2, "early"), find_plan("optimal", one, "zb-v").plan)[1]
        for sharding in ("none", "zero1")
        for one in [Request((chain,), CLUSTER, 16, 2, copies=8, optimizer_sharding=sharding)]
    }
    memory = int((max(needs["none"]) + max(needs["zero1"])) / 2)
    devices = tuple(replace(device, memory=memory) for device in CLUSTER.devices)
    small = Request((chain,), replace(CLUSTER, devices=devices), 16, 2, copies=8, optimizer_sharding="auto")
    answer = find_plan("optimal", small, "zb-v")
    assert answer.plan.optimizer_sharding == "zero1"
    assert not any(stage.recompute for stage in answer.plan.stages)


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="planner='dapple' gives each device one stage, and 'zb-v' needs several"):
        find_plan("dapple", Request((CHAIN,), CLUSTER, 16), "zb-v")
    with pytest.raises(PlanError, match="zb-v has two stages on each device, not 3"):
        find_plan("optimal", Request((CHAIN,), CLUSTER, 16), "zb-v", 3)
    short = Chain("short", 4, CHAIN.layers[:3])
    with pytest.raises(PlanError, match="need two devices and 4 layers at least; the cluster has 4 devices, short 3"):
        find_plan("optimal", Request((short,), CLUSTER, 16), "interleaved")
