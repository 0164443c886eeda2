"""Backward as code where values of tensors decide sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe


class Model(nn.Module):
    """A loss of tokens `x`, a mask of them, their classes and labels of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head, self.scores = nn.Linear(6, 9), nn.Embedding(9, 6)


class Selects(Model):
    """In several ways, also with a name that a size would have."""

    def forward(self, x: Tensor, mask: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        u0 = torch.tanh(self.layers[0](x)) + self.scores(classes)
        h = u0[mask]
        wide = self.layers[1](F.layer_norm(h, (6,))).view(-1, 3, 2).transpose(1, 2).reshape(-1, 6)[:, :4]
        rows, columns = torch.nonzero(classes > 4, as_tuple=True)
        listed = u0[rows, columns]
        few = torch.masked_select(u0, (classes > 2).unsqueeze(-1))
        u1 = u0.clone()
        u1[mask] = self.layers[2](h)
        loss = F.cross_entropy(self.head(u1[mask]), classes[mask], reduction="sum")
        return loss + (listed**2).sum() + few.sin().sum() + wide.exp().sum() + torch.cat([h, listed]).cos().sum()


class Aligns(Model):
    """CTC, with the labels that are not padding behind each other."""

    def forward(self, x: Tensor, mask: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.layers[0](x))).log_softmax(-1).transpose(0, 1)
        there = labels > 0
        lengths = torch.full((len(x),), 5)
        one = F.ctc_loss(scores, labels[there], lengths, there.sum(-1), reduction="sum", zero_infinity=True)
        return one + F.ctc_loss(scores.flip(2), labels.clamp(min=1), lengths, there.sum(-1), reduction="sum")


class Puts(Model):
    """Layers that compute with some tokens, and put them back: of a stage's sizes another stage has others."""

    def forward(self, x: Tensor, mask: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            chosen = mask if place % 2 == 0 else classes > 3
            x = torch.index_put(x, (chosen,), torch.relu(layer(x[chosen])))
        return (self.head(x[mask]) ** 2).sum()


class Routes(Model):
    """Experts, each with the tokens that are for it."""

    def forward(self, x: Tensor, mask: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        tokens = x.reshape(-1, 6)
        shares = self.head(tokens)[:, :3].softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.layers):
            own = torch.where(shares.argmax(-1) == number)[0]
            out = out.index_add(0, own, expert(tokens[own]) * shares[own, number, None])
        return (out * tokens).sin().sum()


def batch(count: int) -> tuple[Tensor, ...]:
    """Tokens of which the first sequence has none that are chosen, and no labels."""
    torch.manual_seed(3)
    mask, labels = torch.rand(count, 5) > 0.4, torch.randint(0, 9, (count, 2))
    mask[0], labels[0] = False, 0
    return torch.randn(count, 5, 6, dtype=torch.float64), mask, torch.randint(0, 9, (count, 5)), labels


@pytest.mark.parametrize("make", [Selects, Aligns, Puts, Routes])
@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        pytest.param(1, {"checkpoint": "never"}, marks=pytest.mark.slow),
        (3, {"checkpoint": "except_last"}),
        pytest.param(3, {"checkpoint": "selective", "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param(7, {"checkpoint": "always"}, marks=pytest.mark.slow),
    ],
)
def test_steps_are_the_models(make: Callable[[], Model], chunks: int, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = make().double()
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, 2, chunks, **options)) as pipe:
        for count in (7, 8):  # in micro-batches of several sizes, also with nothing chosen
            expected = plain(*batch(count))
            expected.backward()
            torch.testing.assert_close(pipe.step(*batch(count)), expected.detach(), rtol=1e-9, atol=1e-9)
            assert not any(stage.autograd_because for stage in pipe.build.program.stages)
            for (name, own), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
