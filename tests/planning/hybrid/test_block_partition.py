"""Balances against trying all cuts."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.block_partition import by_size, by_time, least_variance, smallest_largest


def every_cut(costs, blocks):
    for inner in combinations(range(1, len(costs)), blocks - 1):
        yield [sum(costs[a:b]) for a, b in pairwise((0, *inner, len(costs)))]


def blocks_of(costs, sizes):
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [sum(costs[a:b]) for a, b in pairwise(ends)]


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all(seed):
    rng = random.Random(seed)
    costs = [rng.choice([0, 1, 2, 5, rng.random()]) for _ in range(rng.randint(1, 10))]
    k = rng.randint(1, len(costs))
    assert max(blocks_of(costs, smallest_largest(costs, k))) == pytest.approx(min(map(max, every_cut(costs, k))))
    found = sum(block**2 for block in blocks_of(costs, least_variance(costs, k)))
    assert found == pytest.approx(min(sum(block**2 for block in blocks) for blocks in every_cut(costs, k)))


def test_by_time_and_by_size():
    chain = Chain(
        "m", 1, (Layer("a", 1, 1, 9, 1), Layer("b", 1, 1, 1, 1), Layer("c", 1, 1, 1, 1), Layer("d", 1, 1, 1, 1))
    )
    assert by_time(chain, 2) == (2, 2)
    assert by_size(chain, 2) == (1, 3)
    assert by_size(chain, 2, copies=0) == (2, 2)


def test_more_blocks_than_layers():
    for partition in (smallest_largest, least_variance):
        with pytest.raises(PlanError, match="2 layers cannot be cut into 3 blocks"):
            partition([1.0, 2.0], 3)


def test_many_layers():
    """As many as the largest U-Net of torchgpipe has, in 8 blocks."""
    costs = [1.0 + i % 7 for i in range(2133)]
    assert sum(least_variance(costs, 8)) == sum(smallest_largest(costs, 8)) == 2133
