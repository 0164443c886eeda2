"""How ops are shared by a group: the least time of all ways, and that of layers cut as Megatron-LM cuts them."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.api.profile import ModelProfile
from fxpipe.ir.cluster.network import Rate
from fxpipe.ir.cluster.published_clusters import A100
from fxpipe.passes.sharding.op_cuts import op_cuts
from fxpipe.planning.tensor_parallel.cut_frontier import GroupCosts, cut_space
from fxpipe.planning.tensor_parallel.group_costs import Group
from tests.helpers.models import Block


class Pair(nn.Module):
    """What `widen` and `narrow` are of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(self.norm(x))))


def shared(model: nn.Module, x: Tensor, group: Group) -> tuple[ModelProfile, GroupCosts]:
    known = fxpipe.profile(model, x, device=A100)
    cuts = op_cuts(known.graph, known.sizes, group.degree)
    return known, cut_space(known.graph, known.sizes, known.ops, cuts, group).fastest()


@pytest.mark.parametrize("per_byte", [1e-13, 1e-10, 1e-7])
@pytest.mark.parametrize("width", [64, 2048])
def test_the_time_is_the_least_of_all_ways(width: int, per_byte: float) -> None:
    group = Group(2, Rate(1e-6, per_byte))
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    known, found = shared(model, torch.ones(8, width), group)
    cuts = op_cuts(known.graph, known.sizes, 2)
    assert prod(len(ways) for ways in cuts.values()) <= 100_000

    def seconds(chosen: dict[str, object]) -> float:
        forced = {name: [cut] for name, cut in chosen.items()}
        return cut_space(known.graph, known.sizes, known.ops, forced, group).fastest().seconds  # type: ignore[arg-type]

    every = (dict(zip(cuts, one, strict=True)) for one in product(*cuts.values()))
    assert found.seconds == pytest.approx(min(map(seconds, every)), rel=1e-12)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_pair_of_layers_is_cut_as_megatron_cuts_it(degree: int) -> None:
    """By columns, then by rows; the sums are an all-reduce, or a reduce-scatter and an all-gather around the norm."""
    group = Group(degree, Rate(1e-6, 1e-11))
    known, found = shared(Pair(2048), torch.ones(4, 512, 2048), group)
    kinds = [one for one in found.shardings if one.kind == "linear"]
    assert [one.layout.dim for one in kinds[:1]] == [2]
    assert kinds[1].summed
    size = 4 * 512 * 2048 * 4
    exchanged = 4 * group.spread(size * (degree - 1) / degree)  # of Megatron-LM: one all-reduce forward, one backward
    linear = sum(one.forward + one.backward for one in known.ops if one.name.startswith("linear"))
    others = sum(one.forward + one.backward for one in known.ops) - linear
    assert found.seconds <= linear / degree + others + exchanged
    assert found.seconds == pytest.approx(sum(one.forward + one.backward for one in found.ops))


def test_bytes_of_a_device() -> None:
    """Parameters of products are shared; what is kept for backward is not more than on one device."""
    known, found = shared(Pair(2048), torch.ones(4, 512, 2048), Group(4, Rate(1e-6, 1e-11)))
    before, after = (sum(one.parameters for one in ops) for ops in (known.ops, found.ops))
    assert before / 4 <= after <= before / 4 + 6 * 2048 * 4  # norms and biases may be whole
    assert sum(one.saved for one in found.ops) <= sum(one.saved for one in known.ops) / 2


def test_over_a_slow_link_nothing_is_exchanged() -> None:
    known, found = shared(Pair(64), torch.ones(4, 8, 64), Group(2, Rate(1.0, 1e-3)))
    assert found.seconds <= sum(one.forward + one.backward for one in known.ops)
    assert not any(one.summed for one in found.shardings)


def test_attention_is_cut_by_heads_or_samples() -> None:
    _, found = shared(Block(256, 8), torch.ones(1, 1024, 256), Group(4, Rate(1e-7, 1e-12)))
    ways = {one.kind: one for one in found.shardings if one.kind in ("softmax", "scaled_dot_product_attention")}
    assert all(one.layout.dim == 1 for one in ways.values()), ways  # one sample, so heads
