"""Costs of stages and hops from a hand-made plan, profile, program and cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.profile import OpCost, Profile
from fxpipe.ir.program.program import Loan, Move, Program, Stage
from fxpipe.schedules.simulate.action_costs import hops, stage_costs, taken_bytes
from fxpipe.schedules.simulate.simulate import Hop, StageCost

OPS = (
    OpCost("conv", 0.002, 0.004, saved=100, output=80, parameters=36),
    OpCost("skip", 0.001, 0.001, saved=80, output=80),
    OpCost("y", 0.003, 0.005, saved=50, output=40, parameters=8),
)
PLAN = Plan("Net", (StagePlan(("conv", "skip"), "cpu:0", "always"), StagePlan(("y",), "cpu:1", "never")), chunks=4)

VALUES = {
    "image": TensorType("f32", ("b", 10), "cpu"),
    "skip": TensorType("f32", ("b", 5), "cpu", grad=True),
    "mask": TensorType("bool", ("b", 5), "cpu"),
    "x": TensorType("f32", ("b", 10), "cpu", grad=True),
    "x2": TensorType("f32", ("b", 10), "cpu", grad=True),
    "y": TensorType("f32", ("b", 1), "cpu", grad=True),
}


def program(*devices: str) -> Program:
    """Three stages; a skip and its mask go over the second."""
    takes = (("image",), ("x",), ("x2", "skip", "mask"))
    stages = tuple(Stage(i, d, (), takes[i], (), ()) for i, d in enumerate(devices))
    moves = (
        Move("image", -1, 0), Move("x", 0, 1), Move("skip", 0, 2), Move("mask", 0, 2), Move("x2", 1, 2),
        Move("y", 2, 3),
    )  # fmt: skip
    graph = Graph("Net", True, (), (), (), (), (), ((), {}), None)
    return Program(graph, stages, moves, (Loan("w", 0, 2),), VALUES)


def test_stage_costs() -> None:
    first, last = stage_costs(PLAN, Profile("Net", 8, "cpu", "measured", OPS), taken=(40, 80), copies=3)
    assert first == StageCost(0.003, 0.005, saved=180, taken=40, fixed=108, checkpoint="always")
    assert last == StageCost(0.003, 0.005, saved=50, taken=80, fixed=24, checkpoint="never")


def on_slow(*, forward: float, backward: float) -> Profile:
    """The profile of "cpu" with times on devices named "slow", of which the last op is as fast."""
    times = KindTimes("slow", (forward, forward, 0.003), (backward, backward, 0.005))
    return Profile("Net", 8, "cpu:0", "measured", OPS, kinds=(times,))


def test_a_device_of_another_kind_has_its_own_times() -> None:
    profile = on_slow(forward=0.01, backward=0.03)
    alike = stage_costs(PLAN, profile)
    assert [(cost.forward, cost.backward) for cost in alike] == [(0.003, 0.005)] * 2
    moved = tuple(replace(stage, device=f"slow:{index}") for index, stage in enumerate(PLAN.stages))
    found = stage_costs(replace(PLAN, stages=moved), profile)
    assert [(cost.forward, cost.backward) for cost in found] == [(0.02, 0.06), (0.003, 0.005)]
    assert [cost.saved for cost in found] == [cost.saved for cost in alike]


def test_a_stage_takes_as_long_as_its_slowest_replica() -> None:
    """Of 8 samples the first two of three replicas have three each, the last one two."""
    profile = on_slow(forward=0.003, backward=0.003)  # for both ops 0.006 and 0.006, beside 0.003 and 0.005
    for devices, forward, backward in (
        (("cpu:0", "cpu:1", "slow:0"), 0.006 * 2 / 8, 0.005 * 3 / 8),
        (("slow:0", "cpu:0", "cpu:1"), 0.006 * 3 / 8, 0.006 * 3 / 8),
    ):
        plan = Plan("Net", (replace(PLAN.stages[0], device=devices[0], replicas=devices[1:]),), 4)
        (cost,) = stage_costs(plan, profile)
        assert (cost.forward, cost.backward, cost.saved) == (pytest.approx(forward), pytest.approx(backward), 68)


def test_taken_bytes() -> None:
    assert taken_bytes(program("cpu:0", "cpu:1", "cpu:2"), {"b": 2}) == (80, 80, 80 + 40 + 10)


def test_hops() -> None:
    devices = tuple(Device(f"cpu:{i}", 10**9, 1e9, 1e9) for i in range(3))
    fast, slow = Link(("local", "local"), 1000.0, 0.5), Link(("cpu:0", "cpu:2"), 100.0, 0.25)
    found = hops(program("cpu:0", "cpu:1", "cpu:2"), {"b": 2}, Cluster(devices, (fast, slow)))
    assert found == (
        Hop(0, 1, pytest.approx(0.58), pytest.approx(0.58), "x"),
        Hop(0, 2, pytest.approx(0.75), pytest.approx(0.65), "skip, mask"),  # a mask has no gradient
        Hop(1, 2, pytest.approx(0.58), pytest.approx(0.58), "x2"),
    )


def test_nothing_moves_within_a_device() -> None:
    cluster = Cluster((Device("cpu:0", 10**9, 1e9, 1e9),), ())
    assert {(hop.forward, hop.backward) for hop in hops(program(*["cpu:0"] * 3), {"b": 2}, cluster)} == {(0.0, 0.0)}
