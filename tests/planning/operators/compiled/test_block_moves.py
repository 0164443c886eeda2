"""Leaps: what they touch, and that a state after them is one that was simulated from nothing."""

import pytest

pytest.importorskip("numba")

import numpy as np

from benchmarks.full_simulation import FullCore
from fxpipe.planning.operators.compiled.cut_patterns import patterns
from fxpipe.planning.operators.expert_strategies import data_parallel
from fxpipe.planning.operators.operator_costs import estimated
from tests.helpers.operator_graphs import branches, cluster, lenet, translation


def placed(graph):
    return [operator for operator in graph if operator.kind != "input"]


@pytest.mark.parametrize(
    ("graph", "steps"),
    [(translation(), 50), pytest.param(branches(), 150, marks=pytest.mark.long)],
    ids=lambda value: getattr(value, "name", value),
)
def test_all_times_after_each_leap_and_each_refused_one(graph, steps):
    core = FullCore(graph, cluster(8, servers=2), estimated(), capacity=64)
    core.begin(data_parallel(graph, 8))
    moved = 0
    for step in range(steps):
        before = core.seconds
        core.explore(1, before * (1e6 if step % 2 else 1e-3), share=0.8)
        moved += core.seconds != before
        assert core.differences() == 0, f"step {step}"
    assert moved > steps / 5
    assert core.begin(core.best[0]) == core.best[1]


def test_leaps_find_what_single_changes_do_not():
    """The weights of a layer are exchanged unless all of its steps are on one device."""
    graph, machine, found = translation(steps=6), cluster(4, bandwidth=1e7), {}
    for share in (0.0, 0.5):
        core = FullCore(graph, machine, estimated(launch=1e-7))
        core.begin(data_parallel(graph, 4))
        core.explore(1000, core.seconds * 1e-3, share)
        found[share] = core.best[1]
    assert found[0.5] < 0.7 * found[0.0]


def test_patterns_of_one_operator_are_found_in_others():
    graph = lenet()
    p = FullCore(graph, cluster(4), estimated()).problem
    q = patterns(p, placed(graph))
    at = {operator.name: i for i, operator in enumerate(placed(graph))}

    def like(name, degrees):
        """How each operator is cut that is cut like this one."""
        i = at[name]
        row = next(r for r in range(p.row_first[i], p.row_first[i + 1]) if tuple(p.degrees[r]) == (*degrees, 1, 1))
        rows = q.row_for[q.pattern_of[row]]
        return {other: tuple(map(int, p.degrees[rows[j], :4])) for other, j in at.items()}

    assert set(like("conv1", (2, 1, 1, 1)).values()) == {(2, 1, 1, 1)}
    assert set(like("fc1", (2, 2, 1, 1)).values()) == {(2, 2, 1, 1)}
    by_height = like("conv1", (1, 1, 2, 1))
    assert by_height["pool2"] == (1, 1, 2, 1)
    assert np.prod(by_height["fc1"]) == 2  # it has no height, but is cut into as many parts


def test_orders_have_all_operators_and_blocks_have_likes_together():
    graph = translation()
    core = FullCore(graph, cluster(2), estimated())
    q = patterns(core.problem, placed(graph))
    for order, first, after in zip(q.order, q.block_first, q.block_after, strict=True):
        assert sorted(order) == list(range(len(placed(graph))))
        assert all(f <= x < a for x, (f, a) in enumerate(zip(first, after, strict=True)))
    names = [placed(graph)[i].name for i in q.order[1]]
    assert names[:3] == ["embed_0", "embed_1", "embed_2"]
