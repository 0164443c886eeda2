"""Simulated hybrid plans: their time is the planner's event time, and their memory what the planner counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, warmup_of
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.ir.timeline import check
from fxpipe.planning.hybrid.event_time import Problem, event_time
from fxpipe.schedules.one_f_one_b import gpipe, one_f_one_b
from fxpipe.schedules.simulate.hybrid_costs import simulate_hybrid
from tests.planning.hybrid.test_event_time import on_unequal, random_chain, random_stages, servers


def warmups(plan):
    """The forwards that each stage runs before its first backward."""
    n = len(plan.stages)
    return tuple(warmup_of(plan.warmup, s, n, plan.micro_batches) for s in range(n))


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_the_event_time(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(2, 9))
    if seed % 2:
        chain = on_unequal(rng, chain, 6)
    cluster = servers(2, 3, rng.uniform(1e9, 1e11), rng.uniform(2e8, 5e9), rng.choice([0.0, 1e-4]))
    stages = tuple(replace(e, recompute=rng.random() < 0.3) for e in random_stages(rng, len(chain), 6))
    m, warmup, mode = rng.choice([1, 2, 5, 16, 100]), rng.choice(["early", "late"]), rng.choice(["end", "overlap"])
    sharding = rng.choice(["none", "zero3"])
    plan = HybridPlan("m", stages, m, warmup, mode, optimizer_sharding=sharding)
    problem = Problem(chain, cluster, m, warmup, mode, optimizer_sharding=sharding)
    timeline = simulate_hybrid((chain,), cluster, plan, one_f_one_b(len(stages), m, warmups(plan)))
    check(timeline)
    assert timeline.makespan == pytest.approx(event_time(problem, stages), rel=1e-9)
    for e, ahead, peak in zip(stages, warmups(plan), timeline.high_water, strict=True):
        held = problem.stage(e.first, e.end, e.devices, e.recompute).held(ahead)
        assert peak == pytest.approx(held, rel=1e-6)


def alike(layers: int) -> Chain:
    return Chain("m", 2, tuple(Layer(str(i), 1, 2, 10, 8, 4) for i in range(layers)))


def test_early_backward_keeps_memory_that_does_not_grow_with_micro_batches():
    cluster, stages = servers(1, 4, 1e9, 1e9, 0), (HybridStage(0, 2, (0, 1)), HybridStage(2, 4, (2, 3)))
    peaks = {"1f1b": [], "gpipe": []}
    for m in (2, 8, 16):
        plan = HybridPlan("m", stages, m)
        peaks["1f1b"].append(simulate_hybrid((alike(4),), cluster, plan, one_f_one_b(2, m)).high_water[0])
        peaks["gpipe"].append(simulate_hybrid((alike(4),), cluster, plan, gpipe(2, m)).high_water[0])
    assert peaks == {"1f1b": [40 + 2 * 8] * 3, "gpipe": [40 + m * 8 for m in (2, 8, 16)]}


def test_recomputation_keeps_what_was_taken():
    """L / K layers' activations for one micro-batch, and for each the input of the stage."""
    cluster = servers(1, 2, 1e9, 1e9, 0)
    stages = (HybridStage(0, 2, (0,)), HybridStage(2, 4, (1,), recompute=True))
    timeline = simulate_hybrid((alike(4),), cluster, HybridPlan("m", stages, 8), gpipe(2, 8))
    assert timeline.high_water == (40 + 8 * 16, 40 + 8 * 4 + 16)


def test_all_reduce_layer_by_layer_beside_the_last_backward():
    """Two replicas, two layers of 1 s backward each, rings of 3 s: the second layer's starts a second earlier.

    g0, g1         F0 F0 B0 B0
    all-reduce            3 3 3 2 2 2
    """
    chain = Chain("m", 2, (Layer("a", 2, 2, 3), Layer("b", 2, 2, 3)))
    plan = HybridPlan("m", (HybridStage(0, 2, (0, 1)),), 1, all_reduce="overlap")
    timeline = simulate_hybrid((chain,), servers(1, 2, 1.0, 1.0, 0), plan, gpipe(1, 1))
    spans = [(span.label, span.start, span.end) for span in timeline.on("all-reduce of g0, g1")]
    assert spans == [("b", 3, 6), ("a", 6, 9)]
    assert str(timeline.on("all-reduce of g0, g1")[0]).startswith("all-reduce of stage 0")


def test_a_schedule_for_another_plan():
    plan = HybridPlan("m", (HybridStage(0, 4, (0,)),), 4)
    with pytest.raises(ValueError, match="'gpipe' is for 2 stages and 4 micro-batches; the plan has 1 and 4"):
        simulate_hybrid((alike(4),), servers(1, 2, 1.0, 1.0, 0), plan, gpipe(2, 4))
