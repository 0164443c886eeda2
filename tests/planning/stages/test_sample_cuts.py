"""Cuts between stages of different numbers of replicas lie where all that crosses can be cut."""

from __future__ import annotations

from fxpipe.planning.stages.sample_cuts import replica_cuts
from tests.helpers.planning_graphs import graph

#          0                  1                2               3                4
LINES = ("a = tanh(x)", "m = mean(a)", "b = linear(a, w)", "c = mul(b, m)", "d = tanh(c)")


def test_only_where_the_mean_does_not_cross() -> None:
    legal = [1, 2, 3, 4]
    assert replica_cuts(graph(*LINES), legal, (2, 2, 1), {"m"}) == [legal, [1, 4]]
    assert replica_cuts(graph(*LINES), legal, (2, 1), set()) == [legal]


def test_all_where_it_always_does() -> None:
    assert replica_cuts(graph(*LINES), [2, 3], (2, 1), {"m"}) == [[2, 3]]
