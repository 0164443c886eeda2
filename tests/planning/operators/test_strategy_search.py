"""What a search returns is a local optimum, and on small spaces the optimum."""

import pytest

pytest.importorskip("numba")

from benchmarks.exhaustive_search import best_of_all
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.planning.operators.compiled.block_moves import explore
from fxpipe.planning.operators.compiled.metropolis import begin, improve
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.models.published_models import MODELS
from fxpipe.planning.operators.operator_costs import estimated, once
from fxpipe.planning.operators.simulate_strategy import simulate
from fxpipe.planning.operators.strategy_search import METHODS, compile_core, search
from fxpipe.planning.operators.strategy_space import configs
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.operator_graphs import branches, cluster, lenet, perceptron, rnnlm


@pytest.mark.parametrize("method", slow_in_turn(METHODS, 2))
def test_the_optimum_of_a_small_space(method):
    graph, machine = perceptron(), cluster(4, bandwidth=1e8)
    best = best_of_all(graph, machine, estimated(launch=1e-7))
    found = search(graph, machine, estimated(launch=1e-7), budget=0.5, progress=False, method=method)
    assert found.seconds == best.seconds


@pytest.mark.parametrize("graph", slow_in_turn([lenet(), rnnlm(steps=2)], 2), ids=["lenet", "rnnlm"])
def test_the_optimum(graph):
    """Of the whole space that is searched, with LeNet and two steps of a language model cut in all dimensions, on runs
    of devices: 13 to 26 configs for each of eight operators, 1.3e10 and 8.2e8 strategies."""
    machine = cluster(4, bandwidth=1e8)
    found = [search(graph, machine, budget=4.0, progress=False, method=method) for method in METHODS]
    best = best_of_all(graph, machine, start=min(found, key=lambda one: one.seconds).strategy)
    assert [one.seconds for one in found] == [pytest.approx(best.seconds, rel=1e-12)] * len(METHODS)


@pytest.mark.parametrize("devices", [2, 4])
def test_what_is_found_is_no_worse_than_its_starts(devices):
    graph, machine, cost = rnnlm(), cluster(devices, bandwidth=1e8), estimated(launch=1e-7)
    for method in METHODS:
        found = search(graph, machine, cost, budget=0.5, seed=1, progress=False, method=method)
        core = Core(graph, machine, cost, (found.strategy,))
        assert core.begin(found.strategy) == found.seconds
        assert found.seconds <= min(seconds for _, seconds in found.starts)
        names = [name for name, _ in found.starts]
        assert names[:3] == ["data parallel", "expert", "random"]
        assert names[3:] == (["model parallel", "one device"] if method == "leaps" else [])
        seconds = [cost for _, cost in found.trace]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] == found.seconds


@pytest.mark.parametrize("devices", mostly_slow([2, 4], (2).__eq__))
@pytest.mark.parametrize("graph", [branches(), lenet(), rnnlm()], ids=lambda graph: graph.name)
def test_no_single_change_is_an_improvement_in_plain_simulation(graph, devices):
    machine, cost = cluster(devices, bandwidth=1e8), once(estimated(launch=1e-7))
    found = search(graph, machine, cost, budget=0.1, progress=False)
    assert found.local_optimum
    changed = [found.strategy.replace(at, config) for at, o in enumerate(graph) for config in configs(o, devices)]
    least = min(simulate(graph, machine, strategy, cost) for strategy in changed)
    assert least == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize(("name", "devices"), slow_in_turn([(name, 4 if name == "nmt" else 8) for name in MODELS], 3))
def test_the_six_models_end_in_local_optima(name, devices):
    graph, machine = MODELS[name](), preset(f"p100:{devices}")
    found = search(graph, machine, budget=2.0, progress=False)
    core = Core(graph, machine, estimated(), capacity=1 << 18)
    assert core.begin(found.strategy) == pytest.approx(found.seconds, rel=1e-12)
    assert found.local_optimum
    assert is_local_optimum(core)


def is_local_optimum(core):
    """Whether no change of a single operator makes the strategy that the core is at faster."""
    strategy = core.strategy
    better = any(core.improve(i) for i in range(core.problem.n))
    core.begin(strategy)
    return not better


def test_a_search_may_end_with_its_budget():
    graph, machine = MODELS["nmt"](steps=10), preset("p100:8")
    found = search(graph, machine, budget=0.05, progress=False, finish=False)
    assert not found.local_optimum


@pytest.mark.slow
def test_a_changed_strategy_that_is_worse_is_no_local_optimum():
    graph, machine = perceptron(), cluster(2, bandwidth=1e8)
    cost = estimated(launch=1e-7)
    best = best_of_all(graph, machine, cost)
    core = Core(graph, machine, cost)
    for config in configs(graph.operators[1], 2):
        if core.begin(best.strategy.replace(1, config)) > best.seconds * 1.01:
            assert not is_local_optimum(core)


def test_a_search_needs_time():
    with pytest.raises(ValueError, match="budget above 0"):
        search(perceptron(), cluster(2), budget=0)


def test_an_unknown_method():
    with pytest.raises(ValueError, match="no method 'hope'; there are leaps, mcmc"):
        search(perceptron(), cluster(2), method="hope")


def test_a_search_compiles_nothing_more():
    compile_core()
    functions = begin, improve, explore
    known = [len(function.signatures) for function in functions]
    for method in METHODS:
        search(lenet(), cluster(4), budget=0.1, method=method)
    assert [len(function.signatures) for function in functions] == known
