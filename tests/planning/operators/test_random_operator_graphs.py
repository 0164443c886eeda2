"""The random networks are what they say: graph and module agree, and there is everything among them."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch

from fxpipe.capture import capture
from fxpipe.ir import dataclass_json
from fxpipe.ir.operators.operators import OperatorGraph, check
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.ir.operators.strategy import check as check_strategy
from fxpipe.planning.operators.reading.read_operators import read
from tests.helpers.random_operator_graphs import module, network, strategy


def forms(graph: OperatorGraph) -> Counter[Any]:
    """Every operator with all that it reads, without names."""
    known: dict[str, Any] = {}
    for o in graph:
        roles = o.roles if o.kind != "input" else ()
        facts = (o.kind, o.sizes, roles, o.weights, o.work, o.window, o.stride, o.padding, o.axis)
        known[o.name] = hash((facts, tuple(known[name] for name in o.inputs)))
    return Counter(known.values())


@pytest.mark.parametrize("seed", range(10))
def test_the_module_is_read_as_the_graph(seed: int) -> None:
    made = network(seed)
    check(made.graph)
    got = read(capture(module(made), made.inputs()), {"b": made.batch}).operators
    assert forms(got) == forms(made.graph), f"{got}\n\n{made.graph}"


@pytest.mark.parametrize("seed", range(40))
def test_results_have_the_sizes_of_the_graph(seed: int) -> None:
    made = network(seed)
    model = module(made)
    results = model(*made.inputs())
    assert [tuple(y.shape) for y in results] == [made.graph.operator(name).sizes for name in made.results]
    assert sum(parameter.numel() for parameter in model.parameters()) == made.graph.weights
    torch.testing.assert_close(module(made)(*made.inputs()), results, rtol=0, atol=0)


def test_there_is_everything_among_them() -> None:
    graphs = [network(seed).graph for seed in range(60)]
    count = Counter(operator.kind for graph in graphs for operator in graph)
    assert set(count) == {
        "input", "conv2d", "pool2d", "flatten", "elementwise", "concat", "linear", "lstm", "softmax", "embedding",
        "layer_norm", "scaled_dot_product",
    }  # fmt: skip
    assert min(count.values()) > 5


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_strategies_fit(devices: int) -> None:
    random = Random(devices)
    cut: Counter[str] = Counter()
    for seed in range(30):
        graph = network(seed).graph
        found = strategy(graph, devices, random)
        check_strategy(graph, found, devices)
        assert dataclass_json.read(Strategy, dataclass_json.write(found)) == found
        assert dataclass_json.read(OperatorGraph, dataclass_json.write(graph)) == graph
        for operator, config in zip(graph, found.configs, strict=True):
            cut.update(role for role, degree in zip(operator.roles, config.degrees, strict=True) if degree > 1)
    assert devices == 1 or min(cut[role] for role in "SAP") > 5
