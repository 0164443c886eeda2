"""What a search returns is a local optimum, and on small spaces the optimum."""

from itertools import permutations, product

import pytest

pytest.importorskip("numba")

from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.models.operator_kinds import elementwise, features, linear
from fxpipe.planning.operators.models.published_models import MODELS
from fxpipe.planning.operators.operator_costs import once, roofline
from fxpipe.planning.operators.simulate_strategy import simulate
from fxpipe.planning.operators.strategy_search import METHODS, best_of_all, is_local_optimum, search
from fxpipe.planning.operators.strategy_space import configs
from tests.helpers.marks import mostly_slow
from tests.helpers.operator_graphs import branches, cluster, lenet, rnnlm


def perceptron():
    x = features("x", 8, 64)
    up = linear("up", x, 64)
    relu = elementwise("relu", up)
    return OperatorGraph("perceptron", (x, up, relu, linear("down", relu, 16)))


@pytest.mark.parametrize("bandwidth", mostly_slow([1e6, 1e8, 1e10], lambda bandwidth: bandwidth > 1e6))
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


@pytest.mark.parametrize("method", METHODS)
def test_the_optimum_of_a_small_space(method):
    graph, machine = perceptron(), cluster(4, bandwidth=1e8)
    best = best_of_all(graph, machine, roofline(launch=1e-7))
    found = search(graph, machine, roofline(launch=1e-7), budget=0.5, progress=False, method=method)
    assert found.seconds == best.seconds


def diamond():
    """Two ways from an operator to another."""
    x = features("x", 8, 64)
    up = linear("up", x, 64)
    left, right = linear("left", up, 64), elementwise("right", up)
    return OperatorGraph("diamond", (x, up, left, right, elementwise("sum", left, right)))


def every_config(operator, devices, anywhere):
    """Its configs, with `anywhere` on any devices."""
    for config in configs(operator, devices):
        if anywhere and operator.kind != "input":
            yield from (Config(config.degrees, own) for own in permutations(range(devices), config.parts))
        else:
            yield config


@pytest.mark.parametrize(
    ("graph", "devices", "anywhere"),
    [(diamond(), 2, True), (diamond(), 3, False), (rnnlm(2, layers=1), 2, False)],
    ids=["diamond on any devices", "diamond", "shared weights"],
)
def test_nothing_faster_is_left_out(graph, devices, anywhere):
    """Where ways part and meet, and where steps share weights; in a network slow enough to matter, of a start that all
    of the best have to beat."""
    for bandwidth in (1e6, 3e7):
        machine, cost = cluster(devices, bandwidth=bandwidth, latency=1e-5), once(roofline(launch=1e-7))
        choices = [tuple(dict.fromkeys(every_config(operator, devices, anywhere))) for operator in graph]
        core = Core(graph, machine, cost)
        brute = min(core.begin(Strategy(one)) for one in product(*choices))
        found = best_of_all(graph, machine, cost, anywhere=anywhere)
        assert found.seconds == pytest.approx(brute, rel=1e-12)
        assert simulate(graph, machine, found.strategy, cost) == pytest.approx(found.seconds, rel=1e-12)


def test_all_strategies_of_few_devices_only():
    with pytest.raises(ValueError, match="all strategies are searched for up to 6 parts; here operators have 8"):
        best_of_all(perceptron(), cluster(8))


@pytest.mark.slow
@pytest.mark.parametrize("graph", [lenet(), rnnlm(steps=2)], ids=lambda graph: graph.name)
def test_the_optimum(graph):
    """Of the whole space that is searched, with LeNet and two steps of a language model cut in all dimensions, on runs
    of devices: 13 to 26 configs for each of eight operators, 1.3e10 and 8.2e8 strategies."""
    machine = cluster(4, bandwidth=1e8)
    found = [search(graph, machine, budget=4.0, progress=False, method=method) for method in METHODS]
    best = best_of_all(graph, machine, start=min(found, key=lambda one: one.seconds).strategy)
    assert [one.seconds for one in found] == [pytest.approx(best.seconds, rel=1e-12)] * len(METHODS)


@pytest.mark.parametrize("devices", [2, 4])
def test_what_is_found_is_no_worse_than_its_starts(devices):
    graph, machine, cost = rnnlm(), cluster(devices, bandwidth=1e8), roofline(launch=1e-7)
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


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("graph", [branches(), lenet(), rnnlm()], ids=lambda graph: graph.name)
def test_no_single_change_is_an_improvement_in_plain_simulation(graph, devices):
    machine, cost = cluster(devices, bandwidth=1e8), once(roofline(launch=1e-7))
    found = search(graph, machine, cost, budget=0.1, progress=False)
    assert found.local_optimum
    changed = [found.strategy.replace(at, config) for at, o in enumerate(graph) for config in configs(o, devices)]
    least = min(simulate(graph, machine, strategy, cost) for strategy in changed)
    assert least == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_six_models_end_in_local_optima(name, devices):
    graph, machine = MODELS[name](), preset(f"p100:{devices}")
    found = search(graph, machine, budget=2.0, progress=False)
    core = Core(graph, machine, roofline(), capacity=1 << 18)
    assert core.begin(found.strategy) == pytest.approx(found.seconds, rel=1e-12)
    assert found.local_optimum
    assert is_local_optimum(core)


def test_a_search_may_end_with_its_budget():
    graph, machine = MODELS["nmt"](steps=10), preset("p100:8")
    found = search(graph, machine, budget=0.05, progress=False, finish=False)
    assert not found.local_optimum


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


def test_an_unknown_method():
    with pytest.raises(ValueError, match="no method 'hope'; there are leaps, mcmc"):
        search(perceptron(), cluster(2), method="hope")
