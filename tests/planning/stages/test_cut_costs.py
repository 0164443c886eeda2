"""What stages cost: traffic across cuts by hand, devices, links, memory and recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.planning.stages.cut_costs import stage_costs, traffic
from tests.helpers.planning_graphs import flat, graph

SLOW = Device("cpu:0", memory=1000, flops=1e9, bandwidth=1e9)
FAST = replace(SLOW, label="cuda:0", flops=4e9)
LINK = Link(("local", "local"), bandwidth=16.0, latency=0.25)
BOTH = Cluster((SLOW, FAST), (LINK,))


def costs_of(made):
    return {cost.name: cost for cost in flat(made).ops}


def test_a_skip_crosses_every_cut_that_it_passes():
    made = graph("skip = relu(x)", "a = relu(skip)", "c = relu(a)", "y = add(c, skip)")
    across = traffic(made, costs_of(made))
    assert across.values == (0, 8, 16, 16, 0)  # the input x and the output y go between a stage and the caller
    assert across.gradients == across.values


def test_masks_and_positions_do_not_cross_and_integers_have_no_gradient():
    made = graph("m = ones(batch) : plain", "n = neg(m) : plain", "i = argmax(x) : plain", "y = add(i, n)")
    assert traffic(made, costs_of(made)).values == (0, 0, 0, 8, 0)
    assert traffic(made, costs_of(made)).gradients == (0, 0, 0, 0, 0)


def test_work_is_that_on_the_device_and_recomputation_is_a_second_forward():
    made = graph("a = relu(x)", "y = relu(a)")
    profile = replace(flat(made), kinds=(KindTimes("cuda", (0.25, 0.25), (0.5, 0.5)),))
    first, second = stage_costs(made, profile, BOTH, ("cpu:0", "cuda:0"), ("never", "always"), 4)
    assert first.work == [0, 3 * 10**12, 6 * 10**12]
    assert second.work == [0, 10**12, 2 * 10**12]  # 0.25 + 0.25 + 0.5 s for each


def test_replicas_of_several_kinds():
    """Work is that of the slowest replica for each op, memory that of the smallest device."""
    made = graph("a = relu(x)", "y = relu(a)")
    profile = replace(flat(made), batch=4, kinds=(KindTimes("cuda", (0.25, 4.0), (0.5, 5.0)),))
    cluster = Cluster((SLOW, replace(FAST, memory=600)), (LINK,))
    (found,) = stage_costs(made, profile, cluster, ("cpu:0",), ("never",), 2, further=[("cuda:0",)])
    assert found.work == [0, 3 * 10**12 // 2, 12 * 10**12 // 2]
    assert found.room == 600


def test_transfers_are_paid_on_both_sides_and_cost_nothing_within_a_device():
    made = graph("a = relu(x)", "y = relu(a)")
    first, second, third = stage_costs(made, flat(made), BOTH, ("cpu:0", "cuda:0", "cuda:0"), ["never"] * 3, 4)
    there_and_back = round(2 * (0.25 + 8 / 16) * 10**12)
    assert first.enter == [0, 0, 0]
    assert first.leave == second.enter == [0, there_and_back, 0]
    assert second.leave == third.enter == third.leave == [0, 0, 0]


@pytest.mark.parametrize(("mode", "held"), [("never", 3 * 8), ("except_last", 8), ("always", 8)])
def test_memory_is_copies_of_parameters_and_live_micro_batches(mode, held):
    made = graph("a = linear(x, w)", "y = relu(a)")
    profile = flat(made, parameters={"a": 100})
    one, two = stage_costs(made, profile, BOTH, ("cpu:0", "cpu:0"), (mode, mode), chunks=3, parameter_copies=4)
    assert one.bytes == [0, 400 + held, 400 + 2 * held]
    assert one.hold == [0, 0, 0]
    assert two.hold == [0, 3 * 8, 0]  # what came in is kept for each micro-batch
    assert one.room == two.room == 500
