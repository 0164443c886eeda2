"""Ops that torch composes in C++ are captured for every batch size, and compute what they did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.torch_internals.tracing.composite_ops import OPS, composed_in_python
from tests.helpers.models import Case, vectors
from tests.helpers.transparency import assert_same, build, inputs, plain, step

BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "take along": lambda x: torch.take_along_dim(x, x.detach().argsort(1), 1),
    "take along, one": lambda x: x.take_along_dim(x.detach().argmax(1, keepdim=True), dim=-1) * x,
    "take along, for all": lambda x: torch.take_along_dim(x, torch.tensor([[3, 1, 2, 0, 0, 1, 5, 1]]), 1),
    "kron": lambda x: torch.kron(x, torch.tensor([[1.0, 2.0]], dtype=x.dtype))[:, 4:12],
    "kron of other dimensions": lambda x: torch.kron(x[:, None], torch.ones(2, dtype=x.dtype))[:, 0, :8],
    "product of several": lambda x: torch.linalg.multi_dot([x, x.new_ones(8, 3), x.new_ones(3, 8) / 3]),
}


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Linear(8, 8), nn.Linear(8, 3), body

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(torch.tanh(self.first(x))))


@pytest.mark.parametrize("name", BODIES)
def test_an_op_of_any_batch_size(name: str) -> None:
    case = Case(lambda: Net(BODIES[name]), vectors, frozenset())
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(twin, devices=2, chunks=3)
    for batch in (7, 2):
        wanted = plain(case, model, *inputs(case, batch), 3)
        assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted)
    assert len(pipe._state.cache.builds) == 1
    pipe.close()


def test_torch_has_its_own_ops_again() -> None:
    before = {op: dict(op.py_kernels) for op in OPS}
    with composed_in_python(), composed_in_python():
        assert any(op.py_kernels != before[op] for op in OPS)
    assert {op: dict(op.py_kernels) for op in OPS} == before
