"""Cheap values are computed where they are used; what only looks cheap is not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.program.program import Program
from fxpipe.passes import cut
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.portals import portals
from fxpipe.passes.recompute_cheap import recompute_cheap
from tests.helpers.nets import Chain, Masked, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_same, of_graph, of_program

X = torch.rand(6, 4, dtype=torch.float64)


def lowered(graph: Graph, *sizes: int) -> Program:
    chosen = plan(graph, *sizes)
    return recompute_cheap(portals(cut(graph, chosen), PassContext(chosen)), PassContext(chosen))


def test_a_mask_is_made_in_each_stage_that_uses_it() -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0]).unsqueeze(1)
            return torch.sin(x * rows) * rows

    graph = trace(Mask(), X)
    program = lowered(graph, 3, 1, 1)  # arange unsqueeze mul | sin | mul
    assert [[op.name for op in stage.ops] for stage in program.stages] == [
        ["arange", "unsqueeze", "mul"],
        ["sin"],
        ["arange_1", "unsqueeze_1", "mul_1"],
    ]
    assert program.stages[2].takes == ("sin", "b")
    assert program.types["unsqueeze_1"] == program.types["unsqueeze"]


def test_what_is_used_in_one_later_stage_goes_there_by_its_own_name() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0]).unsqueeze(1)
            return torch.sin(x) * rows

    program = lowered(trace(Late(), X), 3, 1)
    assert [[op.name for op in stage.ops] for stage in program.stages] == [["sin"], ["arange", "unsqueeze", "mul"]]


def not_cheap(make_it: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """A value that stays where it is, and moves."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            value = make_it(self, x)
            return torch.sin(x) + value

    graph = trace(Net(), X)
    n = len(graph.ops)
    before = portals(cut(graph, plan(graph, n - 1, 1)), PassContext(plan(graph, n - 1, 1)))
    assert recompute_cheap(before, PassContext(plan(graph, n - 1, 1))) is before


def test_what_only_looks_cheap_is_not() -> None:
    def written(net: nn.Module, x: Tensor) -> Tensor:
        ones = torch.ones(4)
        ones[0] = 2
        return ones

    def written_through_a_view(net: nn.Module, x: Tensor) -> Tensor:
        ones = torch.ones((2, 2))
        ones[0].add_(1)
        return ones.view(-1)

    not_cheap(written)
    not_cheap(written_through_a_view)
    not_cheap(lambda net, x: nn.functional.dropout(torch.ones(4), 0.5, training=True))  # random
    not_cheap(lambda net, x: torch.zeros_like(x))  # of the batch
    not_cheap(lambda net, x: net.table * 2)  # of the model


def test_a_cheap_output_still_leaves_from_where_it_is_made() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            rows = torch.arange(x.shape[0])
            return torch.sin(x) * rows.unsqueeze(1), rows

    graph = trace(Positions(), X)
    program = lowered(graph, 2, 2)
    assert [[op.name for op in stage.ops] for stage in program.stages] == [
        ["arange", "sin"],
        ["arange_1", "unsqueeze", "mul"],
    ]
    assert [str(move) for move in program.moves if move.value == "arange"] == ["arange  0 -> 2  portal"]


def test_numbers() -> None:
    model, x = make(Masked)
    graph = trace(model, x)
    assert_same(of_program(lowered(graph, 4, 4, 4, 4), model, x), of_graph(graph, model, x))


def test_without_cheap_values_nothing_changes() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    before = cut(graph, plan(graph, 2, 3))
    assert recompute_cheap(before, PassContext(plan(graph, 2, 3))) is before


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Masked)
    golden("passes/recompute_cheap.txt", str(lowered(trace(model, x), 8, 4, 4)))
