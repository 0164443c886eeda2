"""Ops that are shared by groups of devices, in whatever way: outputs, gradients and buffers are those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.ir.graph.graph import op_name
from fxpipe.ir.operators.group_layout import Layout, OpSharding
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.placed_graph import check as check_placed
from fxpipe.passes.sharding.op_cuts import op_cuts
from fxpipe.passes.sharding.share_ops import Groups, share
from tests.helpers.marks import mostly_slow
from tests.helpers.sharded_graphs import Sample, results, sample
from tests.passes.sharding.test_rules import CASES, Calls, linears, sequence

QUICK = {"flat", "matmul", "batch norm", "layer norm", "attention", "fused", "cross entropy, words", "layer"}


def shared(made: Sample, seed: int, groups: Sequence[Groups]) -> Placed:
    """The graph, each op cut in some way, in a stage for each number and size of `groups`."""
    graph, draw = made.graph, Random(seed)
    sizes = {size.name: made.inputs[0].shape[size.dim] for size in graph.sizes}
    cuts = {degree: op_cuts(graph, sizes, degree) for _, degree in groups if degree > 1}
    shardings = {}
    last, count = len(groups) - 1, len(graph.ops)
    stages = {op.name: min(at * len(groups) // count, last) for at, op in enumerate(graph.ops)}
    for op in graph.ops:
        _, degree = groups[stages[op.name]]
        if degree > 1:
            cut = draw.choice(cuts[degree][op.name])
            shardings[op.name] = OpSharding(op.name, op_name(op), cut.layout, cut.summed)
    placed = share(graph, sizes, stages, groups, shardings)
    check_placed(placed, sum(number * degree for number, degree in groups))
    return placed


@pytest.mark.parametrize("name", mostly_slow(CASES, QUICK.__contains__))
def test_any_sharing_computes_the_same(name: str) -> None:
    model, inputs = CASES[name]
    made = sample(model, *inputs)
    for seed, groups in enumerate([[(1, 2)], [(2, 3), (1, 3)], [(1, 2), (4, 2)], [(2, 2), (1, 4), (3, 1)]]):
        placed = shared(made, seed, groups)
        found = results(made.model, made.inputs, placed.graph, typed=True)
        assert found.keys() == made.wanted.keys()
        for key, wanted in made.wanted.items():
            assert wanted is None or torch.allclose(found[key], wanted, rtol=1e-9, atol=1e-11), (seed, key)


def test_all_devices_see_the_same_random_numbers() -> None:
    def drop(layer: nn.Module, x: Tensor) -> Tensor:
        y = F.dropout(layer(x), 0.5)
        return y.sin() ** 2 + y.cos() ** 2 + (y * 2 - y - y)

    made = sample(Calls(drop, *linears(1)), sequence)
    for seed in range(8):
        placed = shared(made, seed, [(2, 2)])
        found = results(made.model, made.inputs, placed.graph)
        assert torch.allclose(found[0], torch.ones_like(found[0]))


@pytest.mark.parametrize("degree", [2, 4])
def test_a_sum_moves_as_in_a_ring(degree: int) -> None:
    """Of a sum that all of n devices have in the end, each sends 2 (n - 1) / n."""
    made = sample(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.zeros(4, 8))
    sizes = {size.name: made.inputs[0].shape[size.dim] for size in made.graph.sizes}
    first, last = (op.name for op in made.graph.ops if op_name(op) == "linear")
    cut = {first: OpSharding(first, "linear", summed=1), last: OpSharding(last, "linear", Layout(1))}
    placed = share(made.graph, sizes, {op.name: 0 for op in made.graph.ops}, [(1, degree)], cut)
    names = {op.name: op for op in placed.graph.ops}
    moves = {(name, placed.devices[op.name]) for op in placed.graph.ops for name in op.reads if name in names}
    far = [names[name] for name, device in moves if placed.devices[name] != device]
    returned = (degree - 1) * 32 // degree  # what the first device takes from others for the caller
    assert sum(prod(op.type.shape) for op in far) == 2 * (degree - 1) * 32 + returned
