"""Mutations: memory from outside is never written, buffers are listed, and those that matter are read again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fxpipe.ir.graph.graph import Graph, Ref
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes import cut
from fxpipe.passes.copy_on_write import copy_on_write
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.portals import portals
from tests.helpers.nets import Chain, Counting, InPlace, Normed, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_repeatable, assert_same, of_graph, of_program

X = torch.rand(6, 4, dtype=torch.float64)


def lowered(graph: Graph, *sizes: int) -> Program:
    chosen = plan(graph, *sizes)
    return copy_on_write(portals(cut(graph, chosen), PassContext(chosen)), PassContext(chosen))


def clones(stage: Stage) -> list[str]:
    return [f"{op.name} = {op.args[0]}" for op in stage.ops if op.target is torch.clone]


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x + 1
        y = h * 2
        return nn.functional.relu(h, inplace=True) * y


def test_a_taken_value_is_written_in_a_copy() -> None:
    program = lowered(trace(Relu(), X), 2, 2)  # add mul | relu mul
    assert clones(program.stages[1]) == ["add_1 = add"]
    assert program.stages[1].ops[1].writes == ("add_1",)
    assert program.stages[1].ops[1].args == (Ref("add_1"),)
    assert program.stages[1].takes == ("add", "mul")


def test_a_value_of_the_stages_own_is_written_as_it_is() -> None:
    program = lowered(trace(Relu(), X), 4)
    assert clones(program.stages[0]) == []


def test_the_callers_batch_is_not_written() -> None:
    class Normalise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sub_(1).mul_(2)

    model, x = Normalise(), X.clone()
    program = lowered(trace(model, x), 1, 1)
    assert [clones(stage) for stage in program.stages] == [["x_1 = x"], ["sub__1 = sub_"]]
    assert_repeatable(program, model, x)


def test_a_view_of_a_taken_value_is_a_view_of_the_copy() -> None:
    class Top(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(x)
            g = h + 1
            half = h[:, :2]  # the last reader of h: its memory has no other name when half is written
            return torch.cat([half.mul_(2), half], 1) * g

    model = Top()
    program = lowered(trace(model, X), 2, 4)
    assert clones(program.stages[1]) == ["sin_1 = sin"]
    assert_same(of_program(program, model, X), of_graph(trace(model, X), model, X))
    assert_repeatable(program, model, X)


def test_a_view_that_is_given_shows_what_was_written_after_it_was_made() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.sin(x) + 1
            pairs = h.view(-1, 2, 2)
            h.mul_(3)  # pairs changes too
            y = h + 1
            return y, pairs * 2

    model = Late()
    graph = trace(model, X)
    program = lowered(graph, 4, 2)  # sin add view mul_ | add mul
    assert program.stages[0].gives == ("view", "mul_")
    assert_same(of_program(program, model, X), of_graph(graph, model, X))
    assert_repeatable(program, model, X)


def test_what_leaves_a_stage_is_no_view_of_a_changing_buffer() -> None:
    model, x = make(Counting)
    graph = trace(model, x)
    program = lowered(graph, 4, 5, 3)
    assert clones(program.stages[0]) == ["steps_1 = steps", "add_ = add__3"]  # kept for backward; given
    assert program.stages[0].ops[-1].name == "add_"
    assert_repeatable(program, model, x)


def test_buffers_are_listed_and_read_again_where_results_depend_on_them() -> None:
    model, x = make(Counting)
    stage = lowered(trace(model, x), 12).stages[0]
    assert stage.mutates == ("steps", "average", "calls")
    assert stage.rereads == ("steps",)


def test_running_statistics_are_not_read_again() -> None:
    model, x = make(Normed)
    stage = lowered(trace(model, x), 7).stages[0]
    assert stage.mutates == ("norm_num_batches_tracked", "norm_running_mean", "norm_running_var")
    assert stage.rereads == ()


def test_running_statistics_that_something_else_reads_are_read_again() -> None:
    class Peeking(Normed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.norm.running_mean

    model, x = make(Peeking)
    stage = lowered(trace(model, x), 8).stages[0]
    assert stage.rereads == ("norm_running_mean",)
    assert_repeatable(lowered(trace(model, x), 8), model, x)


def test_numbers() -> None:
    model, x = make(InPlace)
    graph = trace(model, x)
    program = lowered(graph, 1, 4, 1, 6, 3)
    assert_same(of_program(program, model, x), of_graph(graph, model, x))
    assert_repeatable(program, model, x)


def test_without_writes_nothing_changes() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    before = cut(graph, plan(graph, 2, 3))
    assert copy_on_write(before, PassContext(plan(graph, 2, 3))) is before


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Counting)
    golden("passes/copy_on_write.txt", str(lowered(trace(model, x), 4, 5, 3)))
    model, x = make(InPlace)
    golden("passes/mutations_in_place.txt", str(lowered(trace(model, x), 1, 4, 1, 6, 3)))
