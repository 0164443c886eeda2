"""Sparse tensors of a model, as the neighbours in a graph are: autograd trains the stages that read them, and gradients
are the model's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe

LAYOUTS = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")


class Neighbours(nn.Module):
    def __init__(self, sparse: Callable[[Tensor], Tensor], learnt: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 2).double()
        adjacency = sparse((torch.eye(6) + torch.eye(6).roll(1, 0) / 2).double())
        self.adjacency = nn.Parameter(adjacency) if learnt else nn.Buffer(adjacency)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.adjacency @ self.first(x).t()).t())


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(8, 6, dtype=torch.float64), torch.rand(8, 2, dtype=torch.float64)


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_the_models(layout: str, learnt: bool) -> None:
    model = Neighbours(LAYOUTS[layout], learnt)
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        assert "by autograd: adjacency is sparse" in pipe.explain()
        assert any(stage.backward is not None for stage in pipe.build.program.stages)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grad)  # it compares layouts too


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 2).double()

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        return self.last(torch.tanh(neighbours @ self.first(x).t()).t())


def test_an_input_is_dense_and_then_sparse() -> None:
    """Another layout is another kind of call."""
    model, (x, y), dense = Mixes(), batch(), torch.eye(6, dtype=torch.float64).roll(1, 0)
    with closing(fxpipe.compile(model, 2, 2, batch_dim={"neighbours": None})) as pipe:
        for neighbours in (dense, dense.to_sparse(), dense.to_sparse_csr(), dense):
            model.zero_grad()
            F.mse_loss(model(x, neighbours), y).backward()
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            pipe.step(x, neighbours, target=y, loss_fn=F.mse_loss)
            torch.testing.assert_close([p.grad for p in model.parameters()], expected)
            assert ("neighbours is sparse" in pipe.explain()) == (neighbours is not dense)


class LooksInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adjacency = nn.Buffer(torch.eye(6, dtype=torch.float64).roll(1, 0).to_sparse().coalesce())

    def forward(self, x: Tensor) -> Tensor:
        to, of = self.adjacency.indices()
        return torch.zeros_like(x).index_add(1, to, x[:, of] * self.adjacency.values())


@pytest.mark.filterwarnings("ignore:.*is kept whole")
def test_a_submodule_that_looks_inside_is_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 6), LooksInside(), nn.Linear(6, 2)).double()
    x, _ = batch()
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe.build.program.stages) == 2
