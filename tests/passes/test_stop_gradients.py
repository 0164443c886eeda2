"""What no gradient comes back for leaves its stage without one."""

from __future__ import annotations

import copy
from contextlib import closing

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.program.program import Program
from fxpipe.passes import cut, lower
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.stop_gradients import stop_gradients
from tests.helpers.nets import Chain, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_same, of_graph, of_program


class Watched(nn.Module):
    """The first value is measured and written over, the second one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        seen = self.a(h)
        h.add_(1)
        mean = seen.detach().mean()
        return self.b(h) * mean


def stopped(model: nn.Module, x: Tensor, *sizes: int) -> Program:
    graph = trace(model, x)
    chosen = plan(graph, *sizes)
    return stop_gradients(cut(graph, chosen), PassContext(chosen))


def gradients(program: Program) -> dict[str, bool]:
    return {name: any(tensor.grad for tensor in tensors(type)) for name, type in program.types.items()}


def test_a_value_that_is_only_measured_is_detached_where_it_was_made() -> None:
    program = stopped(*make(Watched), 3, 2, 2)  # mul linear add_ | detach mean | linear mul
    assert [str(op.target) for op in program.stages[0].ops][-1] == "detach"
    assert program.stages[0].ops[-1].reads == ("linear_2",)
    grads = gradients(program)
    assert (grads["add_"], grads["linear"], grads["linear_2"]) == (True, False, True)


def test_where_every_gradient_comes_back_nothing_changes() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    before = cut(graph, plan(graph, 2, 3))
    assert stop_gradients(before, PassContext(plan(graph, 2, 3))) is before


def test_a_write_through_a_view_brings_gradients_back() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            half = self.a(x)
            whole = torch.zeros_like(x)
            whole[:, :2].mul_(half)
            return self.b(whole)

    program = stopped(*make(Filled), 1, 4)  # linear | zeros_like getitem mul_ linear
    assert gradients(program)["linear"]


def test_an_input_that_is_only_measured() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.detach())

    model, x = make(Scaled)
    graph = trace(model, x.requires_grad_())
    before = cut(graph, plan(graph, 1, 1))
    after = stop_gradients(before, PassContext(plan(graph, 1, 1)))
    assert gradients(before)["x"]
    assert not gradients(after)["x"]


def test_numbers() -> None:
    model, x = make(Watched)
    graph = trace(model, x)
    expected = of_graph(graph, model, x)
    for sizes in ((2, 5), (3, 4), (3, 2, 2), (1, 1, 1, 1, 1, 1, 1)):
        assert_same(of_program(lower(graph, plan(graph, *sizes, checkpoint="always")), model, x), expected)


class Vmapped(nn.Module):
    """Values in a vmap, of which one op makes two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.vmap(lambda row: row.sort()[0] * row.max(0)[0])(self.b(self.a(x)))
        return made


def test_a_gradient_goes_through_several_values_in_a_vmap() -> None:
    model, x = Vmapped(), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        pipe(x).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
