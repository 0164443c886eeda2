"""Costs of stages and hops from a hand-made plan, profile, program and cluster."""

from __future__ import annotations

import pytest

from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.profile import OpCost, Profile
from fxpipe.ir.program.program import Loan, Move, Program, Stage
from fxpipe.ir.schedule.action_times import Times
from fxpipe.schedules.simulate.action_costs import hops, stage_costs, taken_bytes, timed_hops
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


def test_a_slower_device_takes_longer() -> None:
    cluster = Cluster(tuple(Device(label, 10**9, flops, 1e9) for label, flops in (("cpu:0", 1e9), ("cpu:1", 4e9))))
    found = stage_costs(PLAN, Profile("Net", 8, "cpu:0", "measured", OPS), cluster=cluster)
    assert [(cost.forward, cost.backward) for cost in found] == [(0.003, 0.005), (0.00075, 0.00125)]


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


def test_hops_of_workers_that_wake_up() -> None:
    assert timed_hops(program("cpu:0", "cpu:1", "cpu:0"), Times({}, wake=0.5)) == (
        Hop(0, 1, 0.5, 0.5, "x"),
        Hop(0, 2, 0.5, 0.5, "skip, mask"),
        Hop(1, 2, 0.5, 0.5, "x2"),
    )
