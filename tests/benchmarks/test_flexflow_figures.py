"""The figures of the FlexFlow paper by simulation, and OptCNN's dynamic programme beside all strategies."""

from __future__ import annotations

from itertools import count, product

import pytest

pytest.importorskip("numba")

import fxpipe.planning.operators.strategy_search
from benchmarks import flexflow_figures
from benchmarks.flexflow_figures import HEADS_7, HEADS_10, HEADS_12, iterations, over_time, spaces
from benchmarks.optcnn import Sums, optcnn
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.planning.operators.expert_strategies import data_parallel
from fxpipe.planning.operators.models.convolutional_networks import alexnet
from fxpipe.planning.operators.models.graph_builder import Draft
from fxpipe.planning.operators.models.operator_kinds import elementwise, features, linear
from fxpipe.planning.operators.operator_costs import estimated, once
from fxpipe.planning.operators.simulate_strategy import simulate


def branching() -> OperatorGraph:
    """A line, two branches of one and two operators, and an operator that reads both."""
    add = Draft()
    x = add(linear("a", add(features("x", 64, 512)), 2048))
    left = add(linear("c", add(linear("b", x, 16)), 2048))
    right = add(linear("d", x, 2048))
    add(linear("f", add(elementwise("e", left, right)), 8))
    return add.graph("branching")


def test_optcnn_is_the_least_of_all_sums() -> None:
    graph, cluster, cost = branching(), preset("p100:2"), once(estimated())
    task = Sums(graph, cluster, cost)
    ways = [range(len(own)) for own in task.space]

    def total(way: tuple[int, ...]) -> float:
        edges = sum(seconds[way[a], way[c]] for (a, c), seconds in task.between.items())
        return float(edges + sum(seconds[way[at]] for at, seconds in task.own.items()))

    totals = {way: total(way) for way in product(*ways)}
    strategy, seconds = optcnn(graph, cluster, cost)
    assert seconds == pytest.approx(min(totals.values()), rel=1e-12)
    chosen = tuple(own.index(config) for own, config in zip(task.space, strategy.configs, strict=True))
    assert totals[chosen] == pytest.approx(seconds, rel=1e-12)
    plain = tuple(own.index(one) for own, one in zip(task.space, data_parallel(graph, 2).configs, strict=True))
    assert seconds < totals[plain]


def test_of_a_single_operator_the_sum_is_the_step() -> None:
    add = Draft()
    add(linear("a", add(features("x", 64, 512)), 2048))
    graph, cluster, cost = add.graph("one"), preset("p100:2"), once(estimated())
    strategy, seconds = optcnn(graph, cluster, cost)
    assert seconds == pytest.approx(simulate(graph, cluster, strategy, cost), rel=1e-9)


def test_what_is_left_of_a_graph_may_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.optcnn.MOST", 1)
    with pytest.raises(ValueError, match="are left, with too many strategies to try"):
        optcnn(branching(), preset("p100:2"))


@pytest.mark.slow
def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()  # a tenth of a second passes between two looks at the clock, however busy the machine is
    monkeypatch.setattr(fxpipe.planning.operators.strategy_search, "monotonic", lambda: next(ticks) / 10)
    monkeypatch.setattr(flexflow_figures, "MODELS", {"alexnet": lambda: alexnet(16, width=4, hidden=64)})
    row = dict(zip(HEADS_7, iterations("alexnet", "p100:4", True, 20), strict=True))
    assert row["times data par."] == pytest.approx(row["found"] / row["data par., it/s"])
    assert row["times data par."] >= 1
    others = [dict(zip(HEADS_10, one, strict=True)) for one in spaces("alexnet", "p100:4", True, 20)]
    assert [one["space"] for one in others] == ["REINFORCE's", "OptCNN's"]
    assert others[0]["times"] >= 1
    times = [dict(zip(HEADS_12, one, strict=True)) for one in over_time("alexnet", "p100:4", 0.01)]
    assert times[-1]["full, s"] >= 0.01
    assert [one["proposals"] for one in times[:2]] == [16, 48][: len(times)]
