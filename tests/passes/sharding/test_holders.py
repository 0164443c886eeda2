"""Strategies in which regions have several holders: partial sums and copies, of linear layers, products, and blocks of
a transformer in Megatron-LM's layout."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Op
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.expert_strategies import megatron
from tests.helpers.random_operator_graphs import module, network
from tests.helpers.sharded_graphs import anyhow, assert_exact, sample


class Mlp(nn.Module):
    def __init__(self, channel: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channel)
        self.up, self.down = nn.Linear(channel, 4 * channel, bias), nn.Linear(4 * channel, channel, bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Attention(nn.Module):
    def __init__(self, channel: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(channel)
        self.q, self.k, self.v, self.out = (nn.Linear(channel, channel) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(y.shape)
        return x + self.out(y)  # type: ignore[no-any-return]


class Product(nn.Module):
    """Both operands depend on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 7), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.a(x) @ self.b(y))


def on(ops: tuple[Op, ...], devices: dict[str, int], kind: str) -> list[tuple[str, int]]:
    return [(op.name, devices[op.name]) for op in ops if kind in op.name]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("block", [Mlp(), Mlp(bias=False), Attention(), nn.Sequential(Attention(), Mlp())])
def test_megatrons_layout(block: nn.Module, devices: int) -> None:
    """Each layer that is cut by what it sums over has a partial sum on each device. Its sum is where it is read: all
    devices go on with that of a block, and one returns the last."""
    made = sample(block, torch.randn(2, 5, 8))
    strategy = megatron(made.reading.operators, devices)
    placed = assert_exact(made, strategy, devices)
    pairs = zip(made.reading.operators, strategy.configs, strict=True)
    layers = sum(operator.summed > 0 and config.holders > 1 for operator, config in pairs)
    assert layers > 0
    places = sorted([*range(devices)] * layers)
    assert sorted(device for _, device in on(placed.graph.ops, dict(placed.devices), "_partial")) == places
    sums = [device for _, device in on(placed.graph.ops, dict(placed.devices), "_sum")]
    assert set(sums) == (set(range(devices)) if layers > 1 else {0})


def test_a_product_of_two_values() -> None:
    made = sample(Product(), torch.randn(3, 4, 6), torch.randn(3, 7, 6))
    operators, random = made.reading.operators, Random(0)
    at = next(at for at, operator in enumerate(operators) if operator.kind == "matmul")
    for config in (
        Config((1, 1, 1), (0, 1, 1), 3),
        Config((1, 2, 1), (0, 1, 2, 1), 2),
        Config((1, 1, 5), (0, 1) * 5, 2),
    ):
        assert_exact(made, anyhow(operators, 3, random).replace(at, config), 3)


@pytest.mark.parametrize("seed", range(4))
def test_random_networks(seed: int) -> None:
    """Regions have up to three holders, on any devices."""
    made, random = network(seed), Random(seed)
    whole = sample(module(made), *made.inputs())
    for _ in range(3):
        assert_exact(whole, anyhow(whole.reading.operators, 3, random, holders=3), 3)


def test_a_pipe_takes_steps() -> None:
    model, x, y = (
        nn.Sequential(Attention(), Mlp()).double(),
        torch.randn(4, 5, 8).double(),
        torch.randn(4, 5, 8).double(),
    )
    operators = sample(model, x).reading.operators
    wanted = F.mse_loss(model(x), y)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    pipe = fxpipe.compile(model, devices=["cpu:0", "cpu:1"], plan=(operators, megatron(operators, 2)))
    got = pipe.step(x, target=y, loss_fn=F.mse_loss)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
    pipe.close()


def test_what_is_random_is_drawn_once() -> None:
    made = sample(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4)), torch.randn(6, 4))
    placed = made.shard(megatron(made.reading.operators, 2))
    assert len([op for op in placed.graph.ops if op.random]) == 2  # the two halves of the channels
    fed, *_ = megatron(made.reading.operators, 2).configs
    copies = Config((1, 1), (0, 1), 2)
    placed = made.shard(Strategy((fed, *[copies] * (len(made.reading.operators) - 1))))
    assert len([op for op in placed.graph.ops if op.random]) == 1


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)  # type: ignore[no-any-return]


def test_a_vocabulary_is_not_cut() -> None:
    made = sample(Words(), torch.randint(0, 10, (4, 3)))
    with pytest.raises(
        PlanError, match="'table' is cut summed/2: partial sums of kind 'embedding' can be simulated, but only"
    ):
        made.shard(megatron(made.reading.operators, 2))
