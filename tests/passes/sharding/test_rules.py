"""Every op that has a rule, cut in every way: the parts are the whole."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.marks import mostly_slow
from tests.helpers.sharded_graphs import anyhow, assert_exact, sample


class Calls(nn.Module):
    """Layers, and what is done with them."""

    def __init__(self, call: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.call, self.layers = call, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*self.layers, *inputs)


image, vector, words = torch.randn(6, 4, 7, 6), torch.randn(6, 8), torch.randint(0, 9, (6, 5))
labels, sequence = torch.tensor([0, 1, 2, -100, 3, 1]), torch.randn(6, 5, 8)


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], 4, 2).transpose(1, 2)


def attention(q: nn.Module, k: nn.Module, v: nn.Module, x: Tensor, **options: Any) -> Tensor:
    y = F.scaled_dot_product_attention(heads(q(x)), heads(k(x)), heads(v(x)), **options)
    return y.transpose(1, 2).reshape(x.shape)


def positions(layer: nn.Module, x: Tensor) -> Tensor:
    """Ops over a named dimension, of a tensor that does not depend on the samples."""
    at = torch.arange(x.shape[1], dtype=x.dtype)
    table = torch.stack((at, at.cumsum(0)), -1)
    angles = torch.cat((table, F.pad(table, (1, 1))), dim=-1).softmax(0).sum(-1)
    return layer(x) * angles.unsqueeze(-1) * at.mean(dim=0)


def linears(count: int = 3, channel: int = 8) -> list[nn.Module]:
    return [nn.Linear(8, channel) for _ in range(count)]


def steps(cell: nn.Module, x: Tensor) -> Tensor:
    state, results = None, []
    for one in x.unbind(1):
        state = cell(one, state)
        results.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(results, dim=1)


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "conv": (nn.Conv2d(4, 6, 3, padding=1), (image,)),
    "conv, strides": (nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(2, 0), dilation=(2, 1)), (image,)),
    "conv, same": (nn.Conv2d(4, 6, 4, padding="same", bias=False), (image,)),
    "conv, groups": (nn.Conv2d(4, 8, 3, groups=2), (image,)),
    "conv, depthwise": (nn.Conv2d(4, 4, 3, groups=4, padding=1), (image,)),
    "conv1d": (nn.Conv1d(5, 6, 3, stride=2, padding=1), (sequence,)),
    "pools": (
        Calls(lambda c, x: F.avg_pool2d(F.max_pool2d(c(x), 3, 1, 1), 2), nn.Conv2d(4, 4, 1)),
        (image,),
    ),
    "pools, ceil": (
        Calls(lambda c, x: F.avg_pool2d(F.max_pool2d(c(x), 2, ceil_mode=True), 2, ceil_mode=True), nn.Conv2d(4, 4, 1)),
        (image,),
    ),
    "pools, counts": (
        Calls(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False) * F.avg_pool2d(x, 3, 2, 1)),
        (image,),
    ),
    "pools, adaptive": (Calls(lambda c, x: F.adaptive_avg_pool2d(c(x), (7, 2)), nn.Conv2d(4, 4, 1)), (image,)),
    "pools1d": (Calls(lambda x: F.max_pool1d(x, 3, 2, 1) + F.avg_pool1d(x, 3, 2, 1)), (sequence,)),
    "flat": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(120, 7)), (image,)),
    "linear": (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 5, bias=False)), (sequence,)),
    "matmul": (Calls(lambda a, b, x: torch.matmul(a(x), b(x).transpose(1, 2)) @ x, *linears(2)), (sequence,)),
    "vectors": (Calls(lambda a, b, x: torch.matmul(x, a(x).mean(1).unsqueeze(2)) * 2, *linears(2)), (sequence,)),
    "batch norm": (nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)), (image,)),
    "batch norm, plain": (nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6, affine=False)), (vector,)),
    "batch norm, batch": (nn.BatchNorm2d(4, track_running_stats=False), (image,)),
    "batch norm, eval": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval(), (image,)),
    "layer norm": (nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.LayerNorm((5, 6))), (sequence,)),
    "group norm": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)), (image,)),
    "embedding": (nn.Sequential(nn.Embedding(9, 6, padding_idx=2), nn.Linear(6, 4)), (words,)),
    "embedding, by use": (nn.Embedding(9, 6, scale_grad_by_freq=True), (words,)),
    "lstm": (Calls(steps, nn.LSTMCell(8, 6)), (sequence,)),
    "gru": (Calls(steps, nn.GRUCell(8, 6, bias=False)), (sequence,)),
    "rnn": (Calls(steps, nn.RNNCell(8, 6)), (sequence,)),
    "attention": (Calls(attention, *linears()), (sequence,)),
    "attention, causal": (Calls(lambda q, k, v, x: attention(q, k, v, x, is_causal=True), *linears()), (sequence,)),
    "attention, mask": (
        Calls(lambda q, k, v, x: attention(q, k, v, x, attn_mask=torch.ones(5, 5).tril() > 0), *linears()),
        (sequence,),
    ),
    "softmax": (Calls(lambda a, x: a(x).softmax(-1) + F.log_softmax(a(x), dim=1), *linears(1)), (sequence,)),
    "concat": (Calls(lambda a, b, x: torch.cat([a(x), x, b(x)], -1) * 2, *linears(2)), (sequence,)),
    "fused": (Calls(lambda a, x: sum(part.tanh() for part in a(x).chunk(3, -1)), *linears(1, 12)), (sequence,)),
    "pieces": (
        Calls(lambda a, x: a(x)[:, -1, ::2] * a(x).narrow(2, 1, 4)[:, 0] + x[:, 1, :4], *linears(1)),
        (sequence,),
    ),
    "views of the same shape": (
        Calls(lambda a, x: a(x).flatten(1).reshape_as(x).divide(2).multiply(x), *linears(1, 8)),
        (sequence,),
    ),
    "concatenated": (Calls(lambda a, x: torch.concatenate([a(x), x], -1) * 2, *linears(1)), (sequence,)),
    "views": (
        Calls(lambda a, x: a(x).reshape(-1, 4, 10).permute(0, 2, 1).flatten(1).relu() * 2, *linears(1)),
        (sequence,),
    ),
    "positions": (
        Calls(
            lambda a, e, x: a(x) + e(torch.arange(x.shape[1])) * x.new_ones(x.shape[0], 1, 8),
            *linears(1),
            nn.Embedding(5, 8),
        ),
        (sequence,),
    ),
    "in place": (Calls(lambda a, x: a(x).add_(1).mul_(x).relu_() - 1, *linears(1)), (sequence,)),
    "expand": (Calls(lambda a, x: x.unsqueeze(1).expand(-1, 3, -1) * a(x).unsqueeze(1), *linears(1)), (vector,)),
    "cross entropy": (Calls(lambda a, x, y: F.cross_entropy(a(x), y), *linears(1, 4)), (vector, labels)),
    "cross entropy, weights": (
        Calls(
            lambda a, x, y: F.cross_entropy(a(x), y, torch.arange(1.0, 5).double(), label_smoothing=0.1), *linears(1, 4)
        ),
        (vector, labels),
    ),
    "cross entropy, sum": (
        Calls(lambda a, x, y: F.nll_loss(F.log_softmax(a(x), 1), y, reduction="sum"), *linears(1, 4)),
        (vector, labels),
    ),
    "cross entropy, words": (
        Calls(lambda a, x, y: F.cross_entropy(a(x).view(-1, 9), y.view(-1)), *linears(1, 9)),
        (sequence, words),
    ),
    "cross entropy, each": (
        Calls(lambda a, x, y: F.cross_entropy(a(x).transpose(1, 2), y, reduction="none").mean(), *linears(1, 9)),
        (sequence, words),
    ),
    "probabilities": (Calls(lambda a, x: F.cross_entropy(a(x), x.softmax(1)), *linears(1)), (vector,)),
    "square": (Calls(lambda a, x: F.mse_loss(a(x), x) + F.l1_loss(a(x), x, reduction="sum"), *linears(1)), (sequence,)),
    "divergence": (
        Calls(lambda a, x: F.kl_div(F.log_softmax(a(x), 1), x.softmax(1), reduction="batchmean"), *linears(1)),
        (vector,),
    ),
    "mean": (Calls(lambda a, x: a(x).pow(2).mean() + a(x).sum(), *linears(1)), (sequence,)),
    "layer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (sequence,)),
    "positions, tables": (Calls(positions, *linears(1)), (sequence,)),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, [*CASES][::2].__contains__))
def test_parts_are_the_whole(name: str) -> None:
    model, inputs = CASES[name]
    made = sample(model, *inputs)
    for seed in range(5):
        devices = (2, 3, 4)[seed % 3]
        assert_exact(made, anyhow(made.reading.operators, devices, Random(seed)), devices)
