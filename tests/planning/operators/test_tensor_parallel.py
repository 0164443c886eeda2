"""Megatron-LM's layout as a strategy: what it sends is its formula, and a search that may give regions several holders
finds nothing slower."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("numba")

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Strategy, cut
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.expert_strategies import data_parallel, megatron
from fxpipe.planning.operators.models.graph_builder import Draft
from fxpipe.planning.operators.models.operator_kinds import (
    elementwise,
    embedding,
    features,
    layer_norm,
    linear,
    scaled_dot_product,
    tokens,
)
from fxpipe.planning.operators.operator_costs import estimated
from fxpipe.planning.operators.simulate_strategy import simulate
from fxpipe.planning.operators.strategy_search import search
from fxpipe.planning.operators.strategy_space import configs
from fxpipe.planning.operators.task_graph import Task, tasks
from tests.helpers.operator_graphs import cluster


def layer(batch: int, length: int, hidden: int, heads: int) -> OperatorGraph:
    """A layer of GPT, with the embedding before it."""
    add = Draft()
    x: Operator = add(embedding("embed", add(tokens("words", batch, length)), 1000, hidden))
    norm = add(layer_norm("norm1", x))
    q, k, v = (add(linear(name, norm, hidden)) for name in "qkv")
    x = add(elementwise("add1", x, add(linear("out", add(scaled_dot_product("mix", q, k, v, heads)), hidden))))
    wide = add(elementwise("gelu", add(linear("fc1", add(layer_norm("norm2", x)), 4 * hidden)), work=8.0))
    add(elementwise("add2", x, add(linear("fc2", wide, hidden))))
    return add.graph("layer", 2, "bf16")


def sent(graph: OperatorGraph, cluster: Cluster, strategy: Strategy) -> list[Task]:
    return [task for task in tasks(graph, cluster, strategy, estimated()) if task.size]


def test_the_layout() -> None:
    graph = layer(2, 8, 32, 4)
    cuts = {o.name: cut(o, config) for o, config in zip(graph, megatron(graph, 4).configs, strict=True)}
    assert cuts == {
        "words": "whole",
        "embed": "summed/4",
        **dict.fromkeys(("norm1", "norm2", "add1", "add2"), "copies/4"),
        **dict.fromkeys(("q", "k", "v", "mix", "fc1", "gelu"), "channel/4"),
        **dict.fromkeys(("out", "fc2"), "summed/4"),
    }


def test_heads_that_cannot_be_shared_out_stay_together() -> None:
    graph = layer(2, 8, 36, 3)
    cuts = {o.name: cut(o, config) for o, config in zip(graph, megatron(graph, 4).configs, strict=True)}
    assert (cuts["mix"], cuts["q"], cuts["fc1"]) == ("copies/4", "summed/4", "channel/4")


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_it_sends_what_the_formula_says(devices: int) -> None:
    """Two all-reduces forward and two backward of batch * sequence * hidden numbers, each of 2 (n - 1) / n of them for
    each device, and one more for the embedding; no weights' gradients."""
    graph, machine = layer(4, 64, 256, 8), preset(f"h100:{devices}")
    found = sent(graph, machine, megatron(graph, devices))
    one = 2 * (devices - 1) * 4 * 64 * 256 * graph.element
    assert sum(task.size for task in found) == pytest.approx((2 + 2 + 1) * one)
    names = {"norm1", "out", "norm2", "fc2", "embed"}
    assert {task.label for task in found} == names
    assert {task.kind for task in found} == {"S"}
    assert len(found) == len(names) * devices


def test_a_search_finds_nothing_slower() -> None:
    graph, machine, cost = layer(1, 2048, 4096, 32), preset("h100:4"), estimated()
    tensor, data = (simulate(graph, machine, make(graph, 4), cost) for make in (megatron, data_parallel))
    found = search(graph, machine, cost, budget=1.0, roles="SAPR", progress=False, finish=False)
    assert found.seconds <= min(tensor, data)
    assert found.seconds == pytest.approx(simulate(graph, machine, found.strategy, cost), rel=1e-12)
    assert any(config.holders > 1 for config in found.strategy.configs)


def test_the_best_of_all_strategies_of_a_small_graph() -> None:
    """Of 6 * 6 * 7 strategies, all of which the compiled core times as plain Python does."""
    x = features("x", 2, 8)
    up = linear("up", x, 6)
    graph = OperatorGraph("pair", (x, up, linear("down", up, 4), layer_norm("norm", linear("down", up, 4))))
    machine, cost = cluster(2, bandwidth=1e9), estimated(launch=1e-9)
    every = [Strategy(chosen) for chosen in product(*(configs(operator, 2, "SAPR") for operator in graph))]
    core = Core(graph, machine, cost, every, "SAPR")
    seconds = [simulate(graph, machine, one, cost) for one in every]
    assert [core.begin(one) for one in every] == pytest.approx(seconds, rel=1e-12)
    found = search(graph, machine, cost, budget=0.3, roles="SAPR", progress=False)
    assert found.seconds == pytest.approx(min(seconds), rel=1e-12)
    without = [one for one in every if all(config.holders == 1 for config in one.configs)]
    assert len(without) < len(every)
