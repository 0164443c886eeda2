"""What an exhaustive search returns is what brute force finds."""

from itertools import permutations, product

import pytest

pytest.importorskip("numba")

from benchmarks.exhaustive_search import best_of_all
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.models.operator_kinds import elementwise, features, linear
from fxpipe.planning.operators.operator_costs import estimated, once
from fxpipe.planning.operators.simulate_strategy import simulate
from fxpipe.planning.operators.strategy_space import configs
from tests.helpers.operator_graphs import cluster, perceptron, rnnlm

pytestmark = pytest.mark.slow  # the search takes half a minute to compile


@pytest.mark.parametrize(
    "bandwidth", [pytest.param(1e6, marks=pytest.mark.long), 1e8, pytest.param(1e10, marks=pytest.mark.long)]
)
def test_exhaustive_search_finds_what_brute_force_finds(bandwidth):
    graph, machine, cost = perceptron(), cluster(2, bandwidth=bandwidth), estimated(launch=1e-7)
    choices = [configs(operator, 2) for operator in graph]
    brute = min(simulate(graph, machine, Strategy(one), cost) for one in product(*choices))
    found = best_of_all(graph, machine, cost)
    assert found.seconds == pytest.approx(brute, rel=1e-12)
    assert simulate(graph, machine, found.strategy, cost) == pytest.approx(brute, rel=1e-12)


def test_pruning_leaves_most_strategies_out():
    graph = perceptron()
    found = best_of_all(graph, cluster(4), estimated(launch=1e-7))
    everything = 1
    for operator in graph:
        everything *= len(configs(operator, 4))
    assert found.proposals < everything


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
        machine, cost = cluster(devices, bandwidth=bandwidth, latency=1e-5), once(estimated(launch=1e-7))
        choices = [tuple(dict.fromkeys(every_config(operator, devices, anywhere))) for operator in graph]
        core = Core(graph, machine, cost)
        brute = min(core.begin(Strategy(one)) for one in product(*choices))
        found = best_of_all(graph, machine, cost, anywhere=anywhere)
        assert found.seconds == pytest.approx(brute, rel=1e-12)
        assert simulate(graph, machine, found.strategy, cost) == pytest.approx(found.seconds, rel=1e-12)


def test_all_strategies_of_few_devices_only():
    with pytest.raises(ValueError, match="all strategies are searched for up to 6 parts; here operators have 8"):
        best_of_all(perceptron(), cluster(8))
