"""Derivatives of derivatives of calls, for random models: skips, weights in several places, buffers that count."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe


class Random(nn.Module):
    """Each layer reads a sum of values before it, and may have the weight of another; and a buffer counts calls."""

    def __init__(self, reads: list[list[int]], weights: list[int], counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in reads)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight = self.layers[weight].weight
        self.reads, self.counts = reads, counts
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x]
        for layer, reads in zip(self.layers, self.reads, strict=True):
            values.append(torch.tanh(layer(sum(values[at % len(values)] for at in reads))))
        if self.counts:
            self.count += 1
        return values[-1], values[len(values) // 2]


LAYERS = st.integers(2, 5).flatmap(
    lambda count: st.tuples(
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=count, max_size=count),
        st.lists(st.integers(0, count - 1), min_size=count, max_size=count),
    )
)


@settings(max_examples=6, deadline=None)
@given(LAYERS, st.booleans(), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["always", "except_last", {0}]))
def test_three_derivatives_are_those_of_the_model(
    layers: tuple[list[list[int]], list[int]], counts: bool, devices: int, chunks: int, mode: str
) -> None:
    model, found = Random(*layers, counts=counts).double(), []
    pipe = fxpipe.compile(copy.deepcopy(model), devices=devices, chunks=chunks, checkpoint=mode)
    given = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    for net in (model, pipe):
        x = given.clone().requires_grad_()
        late, early = net(x)
        (slope,) = torch.autograd.grad(late.square().sum() + early.sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        total = again.square().sum() + slope.sum()
        total.backward(retain_graph=True)
        total.backward()
        found.append([slope, again, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert pipe.count[0] == (chunks if counts else 0)  # once a micro-batch, and not again in a recomputation
    pipe.close()
