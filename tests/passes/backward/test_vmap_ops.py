"""Backward as code through a vmap: what torch runs for it are ops of whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.graph.graph import called
from tests.helpers.coded_programs import coded

Rows = Callable[[Tensor, Tensor], Tensor]


class Mapped(nn.Module):
    """Two layers, and between them what `rows` computes of their values and a weight."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.first, self.second, self.rows = nn.Linear(6, 6), nn.Linear(6, 6), rows

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.rows(self.first(x), self.first.weight))  # type: ignore[no-any-return]


def mask(h: Tensor, weight: Tensor) -> Tensor:
    place = torch.arange(h.shape[1], device=h.device)
    before = torch.vmap(torch.vmap(lambda i, j: j <= i, in_dims=(None, 0)), in_dims=(0, None))(place, place)
    return (h @ h.transpose(1, 2)).masked_fill(~before, -1e9).softmax(-1) @ h


def several(h: Tensor, weight: Tensor) -> Tensor:
    high, low = torch.vmap(lambda row: (row.tanh() * row.sum(), row.sort(-1)[0]))(h)
    return high * low + low


def nested(h: Tensor, weight: Tensor) -> Tensor:
    each = torch.vmap(torch.vmap(lambda row, w: w @ row, in_dims=(0, None), out_dims=1), in_dims=(0, None))
    return each(h, weight).transpose(1, 2).sin()  # type: ignore[no-any-return]


def of_one_stage(h: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.vmap(lambda row: row.norm())(h)
    return torch.vmap(lambda row, s: F.layer_norm(row, (6,)) * s)(h, scale)


@pytest.mark.parametrize("checkpoint", ["never", "always", "selective"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("rows", [mask, several, nested, of_one_stage])
def test_gradients_are_those_of_the_model(rows: Rows, chunks: int, checkpoint: str) -> None:
    x, loss_fn = torch.randn(4, 5, 6, dtype=torch.float64), nn.MSELoss()
    model = Mapped(rows).double()
    plain = copy.deepcopy(model)
    expected = loss_fn(plain(x), x)
    expected.backward()
    pipe = fxpipe.compile(model, devices=2, chunks=chunks, backward="code", checkpoint=checkpoint)
    with closing(pipe):
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(pipe.step(x, target=x, loss_fn=loss_fn), expected)
        assert [stage.autograd_because for stage in pipe.build.program.stages] == ["", ""]
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, weight.grad)


def test_forward_has_the_vmap_unless_backward_needs_what_is_inside() -> None:
    (stage,) = coded(Mapped(mask), torch.randn(4, 5, 6)).stages
    assert "_vmap_increment_nesting" in map(called, stage.ops)
    (stage,) = coded(Mapped(several), torch.randn(4, 5, 6)).stages
    assert not [op for op in stage.ops if "vmap" in called(op) or "lazy_load" in called(op)]
    assert stage.backward is not None
    assert {"row.sort(-1)[0]" in op.origin.code for op in stage.backward.ops} == {True, False}


def test_a_vmap_that_draws_random_numbers_keeps_autograd() -> None:
    def drop(h: Tensor, weight: Tensor) -> Tensor:
        return torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(h)

    (stage,) = coded(Mapped(drop), torch.randn(4, 5, 6)).stages
    assert stage.backward is None
    assert stage.autograd_because.startswith("dropout in a vmap, at ")
    assert "test_vmap_ops.py" in stage.autograd_because


def test_a_vmap_beside_what_asks_for_a_number_of_samples() -> None:
    """torch chooses the kernel of such a convolution by it, so the stage is traced twice, and must be the same."""

    class Convolved(Mapped):
        def __init__(self) -> None:
            super().__init__(mask)
            self.mix = nn.Conv1d(6, 6, 4, padding=3, groups=6)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.mix(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))

    (stage,) = coded(Convolved(), torch.randn(4, 5, 6)).stages
    assert not stage.autograd_because
