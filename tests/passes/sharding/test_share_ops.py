"""Ops that are shared by groups of devices, in whatever way: outputs, gradients and buffers are those of the model."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fxpipe.ir.graph.graph import op_name
from fxpipe.ir.operators.group_layout import OpSharding
from fxpipe.ir.operators.placed_graph import check as check_placed
from fxpipe.passes.sharding.op_cuts import op_cuts
from fxpipe.passes.sharding.share_ops import share
from tests.helpers.marks import mostly_slow
from tests.helpers.sharded_graphs import results, sample
from tests.passes.sharding.test_rules import CASES

QUICK = {"flat", "matmul", "batch norm", "layer norm", "attention", "fused", "cross entropy, words", "layer"}


@pytest.mark.parametrize("name", mostly_slow(CASES, QUICK.__contains__))
def test_any_sharing_computes_the_same(name: str) -> None:
    model, inputs = CASES[name]
    made = sample(model, *inputs)
    graph = made.graph
    sizes = {size.name: inputs[0].shape[size.dim] for size in graph.sizes}
    for seed, replicas in enumerate([(1,), (2, 1), (1, 4)]):
        draw, degree = Random(seed), 2 + seed % 2
        cuts = op_cuts(graph, sizes, degree)
        shardings = {}
        for op in graph.ops:
            cut = draw.choice(cuts[op.name])
            shardings[op.name] = OpSharding(op.name, op_name(op), cut.layout, cut.summed)
        stages = {op.name: min(at * len(replicas) // len(graph.ops), len(replicas) - 1)
                  for at, op in enumerate(graph.ops)}  # fmt: skip
        placed = share(graph, sizes, stages, replicas, shardings, degree)
        check_placed(placed, degree * sum(replicas))
        found = results(made.model, made.inputs, placed.graph, typed=True)
        assert found.keys() == made.wanted.keys()
        for key, wanted in made.wanted.items():
            assert wanted is None or torch.allclose(found[key], wanted, rtol=1e-9, atol=1e-11), (seed, key)
