"""Times on other kinds of devices: by the roofline, op by op, and what a pipe over unequal devices makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.cluster.matrix_speed import MatrixSpeed
from fxpipe.ir.plan import profile as profiles
from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.planning import plan
from fxpipe.planning.stages.cut_costs import traffic
from fxpipe.profiling import estimate, on_kinds

FAST = Device("fast:0", 10**9, 1e13, 1e11, matrices=(MatrixSpeed("f32", 2e13),))
BROAD = Device("broad:0", 10**9, 1e12, 1e12, matrices=(MatrixSpeed("f32", 1e12),))  # multiplies slowly, reads quickly
BOTH = Cluster((FAST, BROAD), (Link(("local", "local"), 1e10, 1e-6),))


def layers(widths: list[int]) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in pairwise(widths):
        found += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*found)


@pytest.fixture(scope="module")
def estimated() -> fxpipe.ModelProfile:
    return fxpipe.profile(layers([2048, 2048, 64]), torch.zeros(256, 2048), device=FAST)


def test_an_estimate_becomes_the_estimate_for_the_other_device(estimated: fxpipe.ModelProfile) -> None:
    """Products by the speed for their type, the rest by the memory, whatever the ratio of `Device.flops`."""
    there = estimate(estimated.graph, estimated.sizes, BROAD)
    (found,) = on_kinds(estimated.graph, estimated.sizes, estimated, BOTH, "fast:0").kinds
    assert found.kind == "broad"
    assert found.forwards == pytest.approx([cost.forward for cost in there.ops])
    assert found.backwards == pytest.approx([cost.backward for cost in there.ops])
    linear, tanh = (there.ops[at].forward / estimated.ops[at].forward for at in (0, 1))
    assert linear > 10
    assert tanh < 0.5


def test_a_measurement_is_scaled_op_by_op(estimated: fxpipe.ModelProfile) -> None:
    twice = tuple(replace(cost, forward=2 * cost.forward, backward=3 * cost.backward) for cost in estimated.ops)
    measured = replace(estimated, source="measured", device="cuda:7", ops=twice, estimated_for=None)
    there = estimate(estimated.graph, estimated.sizes, BROAD)
    found = on_kinds(estimated.graph, estimated.sizes, measured, BOTH, "fast:0")
    assert found.kinds[0].forwards == pytest.approx([2 * cost.forward for cost in there.ops])
    planned = fxpipe.plan(measured, BOTH, 256, planner="straight", micro_batches=1)
    (times,) = planned.chain.kinds
    assert sum(times.backwards) == pytest.approx(sum(3 * cost.backward for cost in there.ops))
    text = profiles.dump(found)
    assert profiles.load(text).kinds == found.kinds
    assert "forward on broad" in profiles.show(found)


def test_times_that_are_given_stay(estimated: fxpipe.ModelProfile) -> None:
    given = KindTimes("broad", (1.0,) * len(estimated.ops), (2.0,) * len(estimated.ops))
    known = replace(estimated, kinds=(given,))
    assert on_kinds(estimated.graph, estimated.sizes, known, BOTH, "fast:0") is known
    assert known.on("broad:0")[estimated.ops[0].name].backward == 2.0
    with pytest.raises(ValueError, match=r"the times of Sequential on broad are not for its 4 ops"):
        profiles.check(replace(known, kinds=(KindTimes("broad", (1.0,), (2.0,)),)), [op.name for op in estimated.ops])


def unequal(random: Random, count: int) -> Cluster:
    """CPU workers with speeds of their own."""

    def device(at: int) -> Device:
        flops, memory = 10 ** random.uniform(10, 12), 10 ** random.uniform(9, 11)
        speeds = (MatrixSpeed("f32", flops * random.uniform(0.5, 8)),)
        return Device(f"cpu:{at}", 10**10, flops, memory, matrices=speeds)

    return Cluster(tuple(map(device, range(count))), (Link(("local", "local"), 1e9, 1e-6),))


@pytest.mark.parametrize("seed", range(3))
def test_cuts_between_unequal_devices_equal_brute_force(seed: int) -> None:
    """Stages by exact balance and by trying all cuts, with estimates for each device made by themselves: 20 clusters
    for each model."""
    random = Random(seed)
    model = layers([random.choice([16, 64, 512]) for _ in range(5)])
    captured = fxpipe.profile(model, torch.zeros(64, model[0].in_features), device=FAST)
    for _ in range(20):
        k = random.choice([2, 3])
        cluster = unequal(random, k)
        known = estimate(captured.graph, captured.sizes, cluster.devices[0])
        profile = on_kinds(captured.graph, captured.sizes, known, cluster, "cpu:0")
        found = plan(captured.graph, profile, cluster, checkpoint="never", slack=0)
        ends = tuple(sum(len(stage.ops) for stage in found.stages[:s]) for s in range(k + 1))
        slowest = _slowest(captured, cluster)
        n = len(captured.ops)
        best = min(slowest((0, *cuts, n)) for cuts in combinations(range(1, n), k - 1))
        assert slowest(ends) == pytest.approx(best, rel=1e-9)


def _slowest(known: fxpipe.ModelProfile, cluster: Cluster) -> Callable[[tuple[int, ...]], float]:
    """The seconds of the slowest stage between these cuts, with its transfers."""
    own = [estimate(known.graph, known.sizes, device).ops for device in cluster.devices]
    across = traffic(known.graph, {cost.name: cost for cost in known.ops})

    def slowest(cuts: tuple[int, ...]) -> float:
        sent = [sum(1e-6 + size / 1e9 for size in (across.values[p], across.gradients[p]) if size) for p in cuts]
        work = [
            sum(cost.forward + cost.backward for cost in own[s][first:end])
            for s, (first, end) in enumerate(pairwise(cuts))
        ]
        return max(one + sent[s] + sent[s + 1] for s, one in enumerate(work))

    return slowest


@pytest.mark.parametrize("options", [{}, {"profile": "measure"}, {"replicas": (2, 1)}], ids=str)
def test_a_pipe_simulates_each_device_with_its_own_times(options: dict[str, Any]) -> None:
    model, x = layers([64, 256, 256, 64]), torch.randn(64, 64)
    cluster = unequal(Random(4), 2 + ("replicas" in options))
    pipe = fxpipe.compile(model, devices=cluster, chunks=2, checkpoint="never", **options)
    pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
    build = pipe.build
    here = estimate(build.graph, build.sizes, cluster.devices[0])
    for stage in build.plan.stages:
        seconds = []
        for label in stage.devices:
            there = estimate(build.graph, build.sizes, cluster.device(label))
            rows = zip(build.profile.ops, here.ops, there.ops, strict=True)
            own = {cost.name: cost.forward * (b.forward / a.forward if a.forward else 1) for cost, a, b in rows}
            seconds.append(sum(own[op] for op in stage.ops) / len(stage.devices))
        spans = [span for span in build.timeline.on(stage.device) if span.kind == "F"]
        assert [span.seconds for span in spans] == pytest.approx([max(seconds)] * 2)
