"""From ops to layers, and from a plan of layers back to a plan of ops."""

from __future__ import annotations

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage
from fxpipe.ir.plan.plan import check
from fxpipe.planning.hybrid.group_layers import as_plan, costed, layers
from tests.helpers.planning_graphs import flat, graph

LINE = ("conv = conv2d(x, w1) @ a", "norm = batch_norm(conv)", "relu = relu(norm)", "last = conv2d(relu, w2) @ b",
        "y = add(last)")  # fmt: skip


def test_each_op_is_a_layer_where_there_are_few():
    made = layers(graph(*LINE), flat(graph(*LINE)))
    assert [layer.name for layer in made.chain.layers] == ["a", "norm", "relu", "b", "y"]
    assert made.ops == (("conv",), ("norm",), ("relu",), ("last",), ("y",))
    assert made.chain.batch == 4
    assert [layer.cut for layer in made.chain.layers] == [8, 8, 8, 8, 0]


def test_cuts_stay_where_little_crosses():
    model = graph(*LINE)
    profile = flat(model, output={"conv": 80, "norm": 40, "last": 80}, forward={"norm": 0.1}, backward={"norm": 0.1})
    made = layers(model, profile, most=2)
    assert made.ops == (("conv", "norm", "relu"), ("last", "y"))
    assert (made.chain.layers[0].forward, made.chain.layers[0].cut) == (2.1, 8)
    assert sum(layer.backward for layer in made.chain.layers) == 2.0 * 4 + 0.1


def test_layers_are_even_where_the_same_crosses_everywhere():
    model = graph("o0 = relu(x)", *(f"o{i} = relu(o{i - 1})" for i in range(1, 12)))
    sizes = [len(ops) for ops in layers(model, flat(model), most=4).ops]
    assert len(sizes) == 4
    assert max(sizes) <= 4


def test_a_skip_crosses_every_cut_that_it_passes():
    model = graph("s = relu(x)", "a = relu(s)", "b = relu(a)", "y = add(b, s)")
    profile = flat(model, output={"s": 100})
    assert [layer.cut for layer in layers(model, profile).chain.layers] == [100, 108, 108, 0]


def test_the_same_layers_at_another_size():
    model = graph(*LINE)
    made = layers(model, flat(model), most=3)
    again = costed(model, flat(model), made)
    assert again == made.chain
    slower = costed(model, flat(model, forward={"conv": 5.0}), made)
    assert sum(layer.forward for layer in slower.layers) == 9.0


def test_what_is_tied_is_one_layer():
    model = graph("p = chunk(x) : tuple", "a = getitem(p)", "b = getitem(p)", "y = add(a, b)")
    assert layers(model, flat(model)).ops == (("p", "a", "b"), ("y",))


def test_a_plan_of_layers_is_a_plan_of_ops():
    """Also where the order with the least traffic is another than the captured one."""
    model = graph("early = relu(z)", "a = relu(x)", "b = relu(a)", "y = add(b, early)", inputs=("x", "z"))
    made = layers(model, flat(model))
    assert made.ops == (("a",), ("b",), ("early",), ("y",))
    hybrid = HybridPlan("Net", (HybridStage(0, 1, (0, 2)), HybridStage(1, 4, (1,), recompute=True)), 8)
    plan = as_plan(model, made, hybrid, ("u", "v", "w"), "1f1b")
    check(plan, [op.name for op in model.ops])
    assert [stage.ops for stage in plan.stages] == [("a",), ("early", "b", "y")]
    assert [stage.devices for stage in plan.stages] == [("u", "w"), ("v",)]
    assert [stage.checkpoint for stage in plan.stages] == ["never", "always"]
    assert (plan.chunks, plan.schedule) == (8, "1f1b")


def test_refusals():
    model = graph(*LINE)
    with pytest.raises(PlanError, match="at most 0 layers"):
        layers(model, flat(model), most=0)
    with pytest.raises(PlanError, match="the profile is for another model"):
        layers(model, flat(graph(*LINE[:3])))
