"""What the first build decides for later graphs: those with the same ops get its plan and profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.profile import check
from fxpipe.planning import Placement
from tests.helpers.planning_graphs import flat, graph

STEP = "a = linear(x, w0)", "c = linear(a, w1)", "y = relu(c)", "loss = mean(y)"
SIZES = {"b": 2, "target_b": 2}


def placement(*stages: tuple[str, ...]) -> Placement:
    step = graph(*STEP)
    profile = replace(flat(step), kinds=(KindTimes("slow", (1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0)),))
    plan = Plan("Net", tuple(StagePlan(ops, f"cpu:{s}", "always") for s, ops in enumerate(stages)), 8)
    return Placement(plan, {"net.w0": 0, "net.w1": 1}, step, SIZES, profile)


def test_a_call_has_the_stages_and_costs_of_the_step_without_its_loss():
    first = placement(("a", "c"), ("y", "loss"))
    call = graph(*STEP[:-1])
    found = first.plan_of(call)
    assert found is not None
    assert [stage.ops for stage in found.stages] == [("a", "c"), ("y",)]
    assert (found.chunks, found.stages[1].device, found.stages[1].checkpoint) == (8, "cpu:1", "always")
    profile = first.profile_of(call, {"b": 2})
    assert profile is not None
    check(profile, [op.name for op in call.ops])
    assert profile.ops == first.profile.ops[:3]
    assert profile.kinds == (KindTimes("slow", (1.0, 2.0, 3.0), (5.0, 6.0, 7.0)),)


def test_a_stage_of_the_loss_alone_has_no_ops():
    found = placement(("a",), ("c", "y"), ("loss",)).plan_of(graph(*STEP[:-1]))
    assert found is not None
    assert [stage.ops for stage in found.stages] == [("a",), ("c", "y"), ()]


def test_other_sizes_have_other_costs_and_the_same_stages():
    first, call = placement(("a", "c"), ("y", "loss")), graph(*STEP[:-1])
    assert first.profile_of(call, {"b": 3}) is None
    assert first.plan_of(call) is not None


@pytest.mark.parametrize(
    "ops",
    [
        ("a = linear(x, w0)", "c = linear(a, w1)", "y = tanh(c)"),  # another op
        ("a = linear(x, w1)", "c = linear(a, w0)", "y = relu(c)"),  # other parameters
        ("c = linear(x, w1)", "y = relu(c)"),  # without the first op
        (*STEP, "z = neg(loss)"),  # one op more
    ],
)
def test_a_graph_with_other_ops_is_planned_by_itself(ops):
    first, call = placement(("a", "c"), ("y", "loss")), graph(*ops)
    assert first.plan_of(call) is None
    assert first.profile_of(call, {"b": 2}) is None


def test_states_of_other_paths_are_other_states():
    call = graph(*STEP[:-1])
    moved = replace(call, states=tuple(replace(state, path=f"other.{state.path}") for state in call.states))
    assert placement(("a", "c"), ("y", "loss")).plan_of(moved) is None


def test_other_numbers_make_another_op():
    """A dropout that is off gives its argument itself, which another op may write."""
    call = graph(*STEP[:-1])
    other = replace(call, ops=(*call.ops[:-1], replace(call.ops[-1], args=(*call.ops[-1].args, False))))
    assert placement(("a", "c"), ("y", "loss")).plan_of(other) is None
