"""Later captures: ops go where their parameters are."""

from __future__ import annotations

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.check_graph import check as check_graph
from fxpipe.ir.plan.plan import Plan, StagePlan, check, stage_of
from fxpipe.planning import homes, plan, plan_like
from fxpipe.planning.stages.op_order import reorder
from tests.helpers.planning_graphs import flat, graph, vmap

CPUS = Cluster.of(["cpu:0", "cpu:1", "cpu:2"])
TRAIN = graph(
    "a = linear(x, w0)", "a1 = dropout(a)", "c = linear(a1, w1)", "c1 = dropout(c)", "d = linear(c1, w2)",
    "y = relu(d)",
)  # fmt: skip
HOMES = {"net.w0": 0, "net.w1": 1, "net.w2": 2}
FIRST = Plan("Net", tuple(StagePlan((name,), f"cpu:{s}", "always") for s, name in enumerate("acd")), 8)


def like(made, where=HOMES):
    found = plan_like(made, where, FIRST, flat(made), CPUS)
    check(found, [op.name for op in made.ops])
    at = {op.name: position for position, op in enumerate(made.ops)}
    check_graph(reorder(made, [at[name] for stage in found.stages for name in stage.ops]))  # the order can run
    return found


def test_homes_are_the_first_stages_that_use_them():
    made = graph("a = linear(x, w0)", "c = linear(a, w1)", "y = linear(c, w0)")
    found = plan(made, flat(made), CPUS)
    assert homes(made, found) == {"net.w0": 0, "net.w1": 1}


def test_the_same_graph_again():
    assert [stage.ops for stage in like(TRAIN).stages] == [("a", "a1"), ("c", "c1"), ("d", "y")]


def test_a_vmap_goes_whole_to_the_last_home_of_its_parameters():
    inside = "i0 = linear(in_v, w0) : inside", "i1 = linear(in_v, w1) : inside"
    made = graph(*vmap("v", "x", *inside), *vmap("u", "x"), "y = linear(v, w2)", "z = add(y, u)")
    found = like(made)
    stage = stage_of(found)
    assert [stage[name] for name in ("enter_v", "in_v", "i0", "i1", "out_v", "v", "leave_v", "y")] == [1] * 7 + [2]
    planned = [name for one in found.stages for name in one.ops]
    for name, count in (("v", 7), ("u", 5)):
        at = planned.index(f"enter_{name}")
        assert planned[at + count - 1] == f"leave_{name}"


def test_a_graph_with_other_ops():
    made = graph("a = linear(x, w0)", *(f"r{n} = relu({f'r{n - 1}' if n else 'a'})" for n in range(8)),
                 "c = linear(r7, w1)", "y = linear(c, w2)")  # fmt: skip
    found = like(made)
    assert [stage_of(found)[name] for name in ("a", "c", "y")] == [0, 1, 2]
    assert [len(stage.ops) for stage in found.stages] == [5, 5, 1]
    assert (found.chunks, found.stages[2].checkpoint) == (8, "always")


def test_stages_without_ops_stay():
    found = like(graph("a = linear(x, w0)", "y = linear(a, w2)"))
    assert [(stage.ops, stage.device) for stage in found.stages] == [
        (("a",), "cpu:0"), ((), "cpu:1"), (("y",), "cpu:2"),
    ]  # fmt: skip


def test_captured_in_another_order():
    made = graph("d = linear(z, w2)", "a = linear(x, w0)", "c = linear(a, w1)", "y = add(c, d)", inputs=("x", "z"))
    assert [stage.ops for stage in like(made).stages] == [("a",), ("c",), ("d", "y")]


def test_values_move_forward_so_the_early_parameter_is_borrowed():
    made = graph("d = linear(x, w2)", "a = linear(d, w0)", "y = linear(a, w2)")
    found = like(made)
    assert [stage_of(found)[name] for name in ("d", "a", "y")] == [len(found.stages) - 1] * 3
    assert found.stages[-1].device == "cpu:2"


def test_a_parameter_that_is_used_again_is_borrowed():
    # A tied embedding at both ends once held everything between in the first stage.
    made = graph("a = linear(x, w0)", "c = linear(a, w1)", "y = linear(c, w0)")
    assert [stage.ops for stage in like(made).stages] == [("a",), ("c",), ("y",)]


def test_no_parameters_at_all():
    made = graph("a = relu(x)", "c = relu(a)", "y = relu(c)")
    assert [len(stage.ops) for stage in like(made).stages] == [1, 1, 1]
    assert [stage.ops for stage in like(graph("y = relu(x)")).stages] == [("y",), (), ()]


def test_what_must_stay_together_comes_before_homes():
    made = graph("a = linear(x, w0) : tuple", "c = linear(a, w1) : tuple", "y = linear(c, w2)")
    assert [stage.ops for stage in like(made).stages] == [("a", "c", "y"), (), ()]


def test_masks_are_made_in_the_stage_of_their_user():
    made = graph("m = ones(batch) : plain", "a = linear(x, w0)", "c = linear(a, w1)", "d = linear(c, w2)",
                 "y = add(d, m)")  # fmt: skip
    costs = flat(made, forward={"m": 0}, backward={"m": 0})
    assert stage_of(plan_like(made, HOMES, FIRST, costs, CPUS))["m"] == 2
