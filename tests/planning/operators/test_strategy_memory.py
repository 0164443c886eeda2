"""Bytes of strategies by hand, in the compiled core, and in a search: beside all strategies of a small space."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("numba")

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.expert_strategies import data_parallel, one_device
from fxpipe.planning.operators.models.operator_kinds import features, linear
from fxpipe.planning.operators.operator_costs import estimated
from fxpipe.planning.operators.simulate_strategy import simulate
from fxpipe.planning.operators.strategy_memory import held
from fxpipe.planning.operators.strategy_search import search
from fxpipe.planning.operators.strategy_space import configs
from tests.helpers.operator_graphs import cluster, lenet, rnnlm


def two_layers() -> OperatorGraph:
    x = features("x", 8, 16)
    first = linear("first", x, 32)
    return OperatorGraph("two", (x, first, linear("second", first, 4)))


FIRST, SECOND = 17 * 32, 33 * 4  # weights


def with_memory(machine: Cluster, memory: int) -> Cluster:
    return replace(machine, devices=tuple(replace(device, memory=memory) for device in machine.devices))


def test_by_hand() -> None:
    graph, whole = two_layers(), Config((1, 1), (0,))
    weights, activations = 4 * (FIRST + SECOND), 4 * 8 * (32 + 4)
    assert held(graph, one_device(graph), 2, 4) == [4 * weights + activations, 0]
    assert held(graph, data_parallel(graph, 2), 2, 4) == [4 * weights + activations / 2] * 2
    by_channel = Strategy((whole, Config((1, 2), (0, 1)), Config((1, 2), (0, 1))))
    beyond = 4 * 8 * 32 / 2  # the half of what `first` puts out that the other device makes
    assert held(graph, by_channel, 2, 4) == [2 * weights + activations / 2 + beyond] * 2
    assert held(replace(graph, kept=3.0), by_channel, 2, 0) == [3 * (activations / 2 + beyond)] * 2


@pytest.mark.parametrize("graph", [lenet(), rnnlm()], ids=["lenet", "rnnlm"])
def test_the_core_counts_the_same(graph: OperatorGraph) -> None:
    """After single changes and leaps, kept and taken back, with memory that some of them exceed."""
    machine = cluster(4, servers=2)
    start = data_parallel(graph, 4)
    core = Core(graph, machine, estimated(), (start,), seed=3, copies=4)
    core.begin(start)
    room = 0.9 * max(core.held)
    core.hold_in_memory([room] * 4, 10 * core.seconds)
    assert core.begin(start) > 10 * simulate(graph, machine, start, estimated())
    for _ in range(5):
        core.explore(60, 0.1 * core.seconds, 0.5)
        assert core.held == pytest.approx(held(graph, core.strategy, 4, 4), rel=1e-9, abs=1e-3)
        now = core.seconds
        assert core.begin(core.strategy) == pytest.approx(now, rel=1e-9)
    core.begin(core.best[0])
    assert max(core.held) <= room
    assert core.seconds == pytest.approx(simulate(graph, machine, core.strategy, estimated()))


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6, 0.45])
def test_the_best_of_those_that_fit(share: float) -> None:
    graph, free = two_layers(), cluster(2, bandwidth=1e8)
    cost = estimated(launch=1e-7)
    machine = with_memory(free, int(share * held(graph, one_device(graph), 2, 4)[0]) + 1)
    spaces = [configs(operator, 2) for operator in graph]
    every = [Strategy(tuple(chosen)) for chosen in product(*spaces)]
    fitting = [one for one in every if max(held(graph, one, 2, 4)) <= machine.devices[0].memory]
    if not fitting:
        with pytest.raises(ValueError, match="no strategy for two was found that fits in memory"):
            search(graph, machine, cost, budget=0.3, progress=False, copies=4)
        return
    found = search(graph, machine, cost, budget=0.3, progress=False, copies=4)
    assert max(held(graph, found.strategy, 2, 4)) <= machine.devices[0].memory
    assert found.seconds == pytest.approx(min(simulate(graph, machine, one, cost) for one in fitting))


def test_what_does_not_fit_is_refused() -> None:
    graph = two_layers()
    with pytest.raises(ValueError, match=r"lacks least needs .* on d., which has 100 B, with 4 bytes for each byte"):
        search(graph, with_memory(cluster(2), 100), budget=0.2, progress=False, copies=4)
