"""Devices that slow each other down: times by hand, and those of the plain simulator where nothing slows down."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.contention import run, simulate_shared, ways
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.expert_strategies import scattered
from fxpipe.planning.operators.models.operator_kinds import elementwise, features
from fxpipe.planning.operators.operator_costs import estimated
from fxpipe.planning.operators.simulate_strategy import run as run_alone
from fxpipe.planning.operators.simulate_strategy import simulate
from fxpipe.planning.operators.task_graph import Task, tasks
from tests.helpers.operator_graphs import cluster
from tests.helpers.random_operator_graphs import network


def task(number: int, device: int, seconds: float, *after: int, kind: str = "F") -> Task:
    return Task((0, number), kind, device, seconds, tuple((0, one) for one in after))


def ends(todo: list[Task], slowed: dict[int, float], devices: int = 2) -> list[float]:
    times = run(todo, {(0, number): seconds for number, seconds in slowed.items()}, devices)
    return [times[one.key].end for one in todo]


def test_what_is_left_runs_faster_once_the_other_is_done() -> None:
    assert ends([task(0, 0, 2), task(1, 1, 1)], {0: 4, 1: 2}) == [3, 2]


def test_alone_nothing_is_slowed_down() -> None:
    assert ends([task(0, 0, 2), task(1, 1, 1, 0)], {0: 4, 1: 2}) == [2, 3]


def test_messages_slow_nobody_down() -> None:
    assert ends([task(0, 0, 2), task(1, 2, 5, kind="T")], {0: 4}) == [2, 5]


def test_with_some_devices_busy_a_part_is_slowed_down_in_proportion() -> None:
    """Two of three are busy: half of the slowdown, 3 s for 2 s of work."""
    assert ends([task(0, 0, 2), task(1, 1, 9)], {0: 4, 1: 9}, devices=3)[0] == 3


def test_tasks_of_no_seconds_and_of_no_device_take_no_time() -> None:
    todo = [task(0, 0, 0), task(1, -1, 0, 0, kind="G"), task(2, 0, 1, 1)]
    assert ends(todo, {0: 0, 2: 3}) == [0, 0, 1]


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_without_slowdown_all_times_are_those_of_the_plain_simulator(seed: int) -> None:
    graph, random = network(seed).graph, Random(seed)
    todo = [
        replace(one, seconds=random.random() if one.seconds else 0.0)  # no two end at once but by what they are
        for one in tasks(graph, cluster(3), scattered(graph, 3, random), estimated())
    ]
    found, plain = run(todo, {one.key: one.seconds for one in todo}, 3), run_alone(todo)
    for key, times in plain.items():
        assert (found[key].ready, found[key].start, found[key].end) == pytest.approx(
            (times.ready, times.start, times.end), rel=1e-9, abs=1e-15
        )


def test_a_device_does_first_what_another_waits_for() -> None:
    """Two branches start on device 0, and the longer one, b, goes on on device 1; backward is the other way round."""
    x = features("x", 1, 1)
    a, b = elementwise("a", x), elementwise("b", x)
    c = elementwise("c", b)
    graph = OperatorGraph("branches", (x, a, b, c, elementwise("d", a)))
    first, second = Config((1, 1), (0,)), Config((1, 1), (1,))
    todo = tasks(graph, cluster(2, latency=0.0), Strategy((first, first, first, second, first)), lambda *_: (1.0, 1.0))
    slowed, found = {one.key: one.seconds for one in todo}, ways(todo)
    starts = {one.label + one.kind: run(todo, slowed, 2, found)[one.key].start for one in todo if one.kind in "FB"}
    assert (starts["b 0F"], starts["a 0F"], starts["d 0F"]) == (0, 1, 2)
    assert starts["d 0B"] < starts["a 0B"] < starts["b 0B"]
    assert run(todo, slowed, 2)[todo[0].key].start == 0  # a, by its key, where none comes first


def test_one_device_takes_what_its_parts_take_alone_and_two_what_they_take_together() -> None:
    x = features("x", 4, 1)
    graph = OperatorGraph("small", (x, elementwise("relu", x)))
    two = cluster(2, bandwidth=1.0, latency=0.0)
    fed = Config((1, 1), (0,))

    def cost(factor: float):  # type: ignore[no-untyped-def]
        return lambda part, device: (factor * part.elements, factor * part.elements)

    one, both = Strategy((fed, fed)), Strategy((fed, Config((2, 1), (0, 1))))
    assert simulate_shared(graph, two, one, cost(1), cost(3)) == simulate(graph, two, one, cost(1)) == 8
    assert simulate_shared(graph, two, both, cost(1), cost(3)) == simulate(graph, two, both, cost(3)) == 12
