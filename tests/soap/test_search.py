"""What a search returns is a local optimum, and on small spaces the optimum."""

from itertools import product

import pytest

pytest.importorskip("numba")

from fxpipe.ir.operators import OperatorGraph
from fxpipe.ir.strategy import Strategy
from fxpipe.soap.core import Core
from fxpipe.soap.costs import roofline
from fxpipe.soap.kinds import elementwise, features, linear
from fxpipe.soap.search import best_of_all, is_local_optimum, search
from fxpipe.soap.simulate import simulate
from fxpipe.soap.space import configs
from fxpipe.soap.strategies import data_parallel
from tests.soap.graphs import cluster, lenet, rnnlm


def perceptron():
    x = features("x", 8, 64)
    up = linear("up", x, 64)
    relu = elementwise("relu", up)
    return OperatorGraph("perceptron", (x, up, relu, linear("down", relu, 16)))


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
def test_exhaustive_search_finds_what_brute_force_finds(bandwidth):
    graph, machine, cost = perceptron(), cluster(2, bandwidth=bandwidth), roofline(launch=1e-7)
    choices = [configs(operator, 2) for operator in graph]
    brute = min(simulate(graph, machine, Strategy(one), cost) for one in product(*choices))
    found = best_of_all(graph, machine, cost)
    assert found.seconds == pytest.approx(brute, rel=1e-12)
    assert simulate(graph, machine, found.strategy, cost) == pytest.approx(brute, rel=1e-12)


def test_pruning_leaves_most_strategies_out():
    graph = perceptron()
    found = best_of_all(graph, cluster(4), roofline(launch=1e-7))
    everything = 1
    for operator in graph:
        everything *= len(configs(operator, 4))
    assert found.proposals < everything


def test_the_chain_finds_the_optimum_of_a_small_space():
    graph, machine = perceptron(), cluster(4, bandwidth=1e8)
    best = best_of_all(graph, machine, roofline(launch=1e-7))
    found = search(graph, machine, roofline(launch=1e-7), budget=1.0, progress=False)
    assert found.seconds == best.seconds


@pytest.mark.slow
@pytest.mark.parametrize("graph", [lenet(), rnnlm(steps=2)], ids=lambda graph: graph.name)
def test_the_chain_finds_the_optimum(graph):
    machine = cluster(4, bandwidth=1e8)
    best = best_of_all(graph, machine, roles="S")
    start = {"data parallel": data_parallel(graph, 4)}
    found = search(graph, machine, roles="S", starts=start, budget=10.0, progress=False)
    assert found.seconds == pytest.approx(best.seconds, rel=1e-12)


@pytest.mark.parametrize("devices", [2, 4])
def test_what_is_found_is_a_local_optimum_and_no_worse_than_its_starts(devices):
    graph, machine, cost = rnnlm(), cluster(devices, bandwidth=1e8), roofline(launch=1e-7)
    found = search(graph, machine, cost, budget=1.5, seed=1, progress=False)
    core = Core(graph, machine, cost, (found.strategy,))
    assert core.begin(found.strategy) == found.seconds
    assert found.local_optimum
    assert is_local_optimum(core)
    assert found.seconds <= min(seconds for _, seconds in found.starts)
    assert [name for name, _ in found.starts] == ["data parallel", "expert", "random"]
    seconds = [cost for _, cost in found.trace]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == found.seconds


def test_a_changed_strategy_that_is_worse_is_no_local_optimum():
    graph, machine = perceptron(), cluster(2, bandwidth=1e8)
    cost = roofline(launch=1e-7)
    best = best_of_all(graph, machine, cost)
    core = Core(graph, machine, cost)
    for config in configs(graph.operators[1], 2):
        if core.begin(best.strategy.replace(1, config)) > best.seconds * 1.01:
            assert not is_local_optimum(core)


def test_a_search_needs_time():
    with pytest.raises(ValueError, match="budget above 0"):
        search(perceptron(), cluster(2), budget=0)
