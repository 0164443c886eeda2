"""Vmaps in forward: what their functions write, views and nested ones, alone and in layers that are alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

import fxpipe

Rows = Callable[[Tensor], Tensor]


def items(h: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        made = row * 2
        made.add_(row.exp())
        made[0] = made[1] + 1
        return made

    return torch.vmap(one)(h)


def views(h: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        made = row.clone()
        made.view(2, 3)[0].mul_(2)
        return made

    return torch.vmap(one)(h)


def outer(h: Tensor) -> Tensor:
    made = h.clone()

    def one(row: Tensor) -> Tensor:
        row.add_(1)
        return row * row

    return torch.vmap(one)(made) + made


def nested(h: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        made = row.clone()
        made += 1
        return made.neg_()

    return torch.vmap(torch.vmap(one))(h[:, None].expand(-1, 5, -1)).sum(1)


def unused(h: Tensor) -> Tensor:
    """A vmap of which nothing is used but what it writes."""
    made = h.clone()
    torch.vmap(lambda row: row.mul_(2))(made)
    return made


class Block(nn.Module):
    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.inner, self.rows = nn.Linear(6, 6), rows

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.rows(self.inner(x)))


@pytest.mark.parametrize("backward", ["autograd", "code"])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("rows", [items, views, outer, nested, unused])
def test_what_a_vmap_does_is_what_the_model_does(rows: Rows, blocks: int, backward: str) -> None:
    x, loss_fn = torch.randn(4, 6, dtype=torch.float64), nn.MSELoss()
    model = nn.Sequential(*(Block(rows) for _ in range(blocks)), nn.Linear(6, 6)).double()
    plain = copy.deepcopy(model)
    expected = loss_fn(plain(x), x)
    expected.backward()
    with closing(fxpipe.compile(model, devices=2, chunks=2, backward=backward)) as pipe:
        torch.testing.assert_close(pipe.step(x, target=x, loss_fn=loss_fn), expected)
        assert [stage.autograd_because for stage in pipe.build.program.stages] == ["", ""]
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), plain(x))
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, weight.grad)
