"""Cutting: relays between neighbours, and a clear refusal where the model cannot be cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import PlanError
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.program import Move
from fxpipe.passes import cut
from tests.helpers.nets import Chain, Counting, InPlace, Parts, Skips, Tied, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.planning_graphs import graph, vmap
from tests.helpers.same_program import assert_same, of_graph, of_program


def test_a_value_is_relayed_by_every_stage_between() -> None:
    model, x = make(Skips)
    graph = trace(model, x)  # linear tanh | sin linear_1 | add exp | mul add_1, and tanh is returned
    program = cut(graph, plan(graph, 2, 2, 2, 2))
    assert [stage.takes for stage in program.stages] == [
        ("x",),
        ("x", "tanh"),
        ("x", "tanh", "linear_1"),
        ("x", "tanh", "exp"),
    ]
    assert [stage.gives for stage in program.stages] == [
        ("x", "tanh"),
        ("x", "tanh", "linear_1"),
        ("x", "tanh", "exp"),
        ("tanh", "add_1"),
    ]
    assert all(move.target - move.source == 1 for move in program.moves)


def test_a_shared_tensor_is_relayed_from_its_first_user() -> None:
    model, x = make(Tied)
    graph = trace(model, x)
    program = cut(graph, plan(graph, 2, 2, 4))
    assert program.stages[0].states == ("embed_weight",)
    assert Move("embed_weight", 0, 1) in program.moves
    assert Move("embed_weight", 1, 2) in program.moves


def test_straight_a_stage_takes_what_it_uses() -> None:
    for net in (Skips, Tied):
        model, x = make(net)
        graph = trace(model, x)
        program = cut(graph, plan(graph, *(1,) * len(graph.ops)), straight=True)
        for stage in program.stages:
            assert {*stage.takes, *stage.states} == set(stage.ops[0].reads)
        assert_same(of_program(program, model, x), of_graph(graph, model, x))


def test_an_input_and_a_parameter_may_be_outputs() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.unused = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.tanh(torch.sin(x)), x, self.unused * 1, self.w

    model, x = Through().double(), torch.rand(6, 4, dtype=torch.float64)
    graph = trace(model, x)
    program = cut(graph, plan(graph, 1, 1, 1))
    assert program.stages[2].states == ("unused", "w")
    assert_same(of_program(program, model, x), of_graph(graph, model, x))


def test_the_plan_may_have_another_order() -> None:
    model, x = make(Parts)
    graph = trace(model, x)
    names = [op.name for op in graph.ops]
    late = [name for name in names if name in ("max_1", "getitem_2", "exp")]
    order = [name for name in names if name not in late] + late
    stages = (StagePlan(tuple(order[:6]), "cpu:0", "never"), StagePlan(tuple(order[6:]), "cpu:1", "never"))
    program = cut(graph, Plan("Parts", stages, 2))
    assert [op.name for stage in program.stages for op in stage.ops] == order
    assert_same(of_program(program, model, x), of_graph(graph, model, x))


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Skips)
    graph = trace(model, x)
    golden("passes/cut.txt", str(cut(graph, plan(graph, 2, 2, 2, 2))))


def refused(net: type[nn.Module], *sizes: int) -> str:
    model, x = make(net)
    graph = trace(model, x)
    with pytest.raises(PlanError) as error:
        cut(graph, plan(graph, *sizes))
    return str(error.value)


def test_refuses_to_tear_a_tuple() -> None:
    assert refused(Parts, 2, 11) == (
        "the model cannot be cut before op getitem, at net.py:5  getitem: chunk is (f64[b, 2], f64[b, 2]), and only "
        "tensors and numbers move between stages. Keep ops chunk to getitem_1, at net.py:6  getitem_1, in one stage"
    )


def test_refuses_to_tear_a_written_view_from_what_it_views() -> None:
    message = refused(InPlace, 9, 6)
    assert "mul__1 changes sub, view, getitem in place, which others see. Keep ops sub to mul__1" in message


def test_refuses_to_tear_a_changed_buffer_from_its_users() -> None:
    message = refused(Counting, 3, 9)
    assert (
        "steps is changed in forward, so all that use it share one stage. Keep ops add_ to mul, at net.py:7" in message
    )


def test_refuses_another_models_plan() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    other = Plan("Other", (StagePlan(("conv", "linear"), "cpu:0", "never"),), 1)
    with pytest.raises(PlanError, match=r"the plan is for another model: 1 of its ops are not in the model \(conv"):
        cut(graph, other)


def test_refuses_an_order_in_which_ops_cannot_run() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    first, *others = (op.name for op in graph.ops)
    late = Plan("Chain", (StagePlan((*others, first), "cpu:0", "never"),), 1)
    with pytest.raises(PlanError, match=r"runs op tanh, at net.py:4  tanh, before op linear.*place tanh after linear"):
        cut(graph, late)


def test_refuses_to_move_a_reader_past_a_write() -> None:
    class Overwriting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x + 1
            before = torch.neg(h)
            return h.mul_(2) * before

    model, x = Overwriting(), torch.rand(6, 4, dtype=torch.float64)
    graph = trace(model, x)
    assert [op.name for op in graph.ops] == ["add", "neg", "mul_", "mul"]
    late = Plan("Overwriting", (StagePlan(("add", "mul_"), "a", "never"), StagePlan(("neg", "mul"), "b", "never")), 1)
    with pytest.raises(PlanError, match=r"moves op neg, at net.py:2  neg, past an op that changes in place what it"):
        cut(graph, late)


def test_refuses_to_move_an_op_into_a_vmap() -> None:
    mapped = graph(*vmap("v", "x"), "s = relu(x)", "y = add(v, s)")
    torn = ("enter_v", "in_v", "s", "out_v", "v", "leave_v", "y")
    with pytest.raises(
        PlanError, match=r"does not place op out_v, at net.py:3 .*, right after op in_v, and both are part"
    ):
        cut(mapped, Plan("Net", (StagePlan(torn, "cpu:0", "never"),), 1))


def test_refuses_an_input_that_is_changed_through_a_view_and_returned() -> None:
    class Returned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.view(-1).mul_(2)
            return x

    model, x = Returned(), torch.rand(6, 4, dtype=torch.float64)
    graph = trace(model, x)
    with pytest.raises(PlanError, match=r"changes the input 'x' in place.*write to a copy \(x.clone\(\)\)"):
        cut(graph, plan(graph, 2))
