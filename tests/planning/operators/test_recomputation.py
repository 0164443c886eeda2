"""Recomputation and micro-batches in strategies: by hand, in the compiled core beside plain Python, and in a search
beside all strategies, sets of groups and numbers of micro-batches of small spaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from math import inf
from random import Random

import pytest

pytest.importorskip("numba")

from benchmarks.full_simulation import FullCore
from fxpipe.ir.operators.operators import OperatorGraph, micro_batch, micro_batch_numbers
from fxpipe.ir.operators.strategy import Config, Strategy, check
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.expert_strategies import data_parallel, one_device
from fxpipe.planning.operators.models.operator_kinds import batch_norm, elementwise, features, linear
from fxpipe.planning.operators.operator_costs import Seconds, estimated, once
from fxpipe.planning.operators.simulate_strategy import computed, makespan, run, simulate, timeline
from fxpipe.planning.operators.strategy_memory import held
from fxpipe.planning.operators.strategy_search import search
from fxpipe.planning.operators.strategy_space import Groups, configs, groups
from fxpipe.planning.operators.task_graph import tasks
from tests.helpers.marks import mostly_slow
from tests.helpers.operator_graphs import branches, cluster, lenet, rnnlm
from tests.planning.operators.test_strategy_memory import with_memory

COST = once(estimated(launch=1e-7))


def layers(count: int = 4, batch: int = 8, width: int = 16) -> OperatorGraph:
    """Linear layers, one after the other."""
    found = [features("x", batch, width)]
    for number in range(count):
        found.append(linear(f"fc{number}", found[-1], width))
    return OperatorGraph("layers", tuple(found))


def subsets(every: Groups) -> Iterator[Groups]:
    return chain.from_iterable(combinations(every, count) for count in range(len(every) + 1))


# By hand ---------------------------------------------------------------------------------------------------------


def test_bytes_of_recomputed_layers() -> None:
    """On one device: of a group what it gives is kept; while it is computed again, all after it is gone."""
    graph = layers()
    one, weights = 4 * 8 * 16, 4 * 4 * 17 * 16
    whole = one_device(graph)
    assert held(graph, whole, 1, 1) == [weights + 4 * one]
    first = ("fc0", "fc1", "fc2")
    assert held(graph, replace(whole, recomputed=(first,)), 1, 1) == [weights + one + 2 * one]
    assert held(graph, replace(whole, recomputed=(("fc3",), first)), 1, 1) == [weights + one + 2 * one]
    halves = replace(whole, recomputed=(("fc0", "fc1"), ("fc2", "fc3")))
    assert held(graph, halves, 1, 1) == [weights + 2 * one + one]
    assert held(graph, replace(whole, recomputed=(("fc0", "fc1"),)), 1, 1) == [weights + 3 * one]
    assert held(replace(graph, kept=3.0), halves, 1, 1) == [weights + 2 * one + 5 * one]


def test_what_comes_from_other_devices_is_kept() -> None:
    """Within a group, a device keeps what it received; what it computed itself it computes again."""
    graph, one = layers(2), 4 * 8 * 16
    apart = Strategy((Config((1, 1), (0,)), Config((1, 1), (0,)), Config((1, 1), (1,))), 1, (("fc0", "fc1"),))
    assert held(graph, apart, 2, 0) == [one, 2 * one]  # one again; one that came, and one that leaves


def test_bytes_and_seconds_of_micro_batches() -> None:
    graph, machine = layers(), cluster(2, bandwidth=1e8)
    halves = replace(data_parallel(micro_batch(graph, 2), 2), micro_batches=2)
    weights, one = 4 * 17 * 16 * 4, 4 * 2 * 16
    assert held(graph, halves, 2, 4) == [4 * weights + 4 * one] * 2
    part = micro_batch(graph, 2)
    times = run(tasks(part, machine, data_parallel(part, 2), COST))
    assert computed(times) < makespan(times), "gradients are exchanged at the end"
    assert simulate(graph, machine, halves, COST) == computed(times) + makespan(times)
    shown = timeline(graph, machine, halves, COST)
    assert shown.makespan == pytest.approx(computed(times) + makespan(times))
    assert {span.micro_batch for span in shown.spans} == {0, 1}
    assert {span.micro_batch for span in shown.spans if span.kind == "A"} == {1}


def test_recomputed_operators_take_their_forward_twice() -> None:
    graph, machine = layers(), cluster(1)
    whole = one_device(graph)

    def cost(part: object, device: object) -> Seconds:
        return 1.0, 10.0

    assert simulate(graph, machine, whole, cost) == 44
    assert simulate(graph, machine, replace(whole, recomputed=(("fc1", "fc2"),)), cost) == 46
    assert simulate(graph, machine, replace(whole, recomputed=(("fc1", "fc2"),), micro_batches=4), cost) == 4 * 46


def test_groups_end_where_little_crosses() -> None:
    """Two blocks, with a narrow layer between."""
    x = features("x", 8, 64)
    wide = [linear("a", x, 64)]
    wide.append(linear("b", wide[-1], 64))
    narrow = linear("narrow", wide[-1], 2)
    wide += [linear("c", narrow, 64)]
    wide += [linear("d", wide[-1], 64)]
    graph = OperatorGraph("blocks", (x, *wide[:2], narrow, *wide[2:]))
    assert groups(graph) == (("a", "b", "narrow"), ("c", "d"))
    assert [name for group in groups(lenet()) for name in group] == [o.name for o in lenet() if o.kind != "input"]


def test_what_is_no_strategy() -> None:
    graph, whole = layers(), one_device(layers())
    for wrong, message in (
        (replace(whole, micro_batches=0), "0 micro-batches"),
        (replace(whole, micro_batches=3), "cannot run in 3 equal micro-batches: its operator 'x' puts out sample 8 S"),
        (replace(whole, recomputed=(("fc9",),)), "recomputes 'fc9', and layers has no such operator"),
        (replace(whole, recomputed=(("fc1",), ("fc2", "fc1"))), "recomputes operator 'fc1' twice"),
        (replace(data_parallel(graph, 8), micro_batches=2), "sample of size 4 cannot be cut into 8 parts"),
    ):
        with pytest.raises(ValueError, match=message):
            check(graph, wrong, 8)


# The compiled core -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("graph", [lenet(), rnnlm(), branches()], ids=lambda graph: graph.name)
@pytest.mark.parametrize("roles", mostly_slow(["SAP", "SAPR"], lambda roles: roles == "SAPR"))
def test_the_core_agrees_with_plain_python(graph: OperatorGraph, number: int, roles: str) -> None:
    """After single changes and leaps, kept and taken back, with random groups and memory that some exceed; and delta
    simulation goes the same way as simulation of everything."""
    machine, rng = cluster(4, bandwidth=1e8, servers=2), Random(number)
    every = groups(graph)
    start = replace(data_parallel(micro_batch(graph, number), 2), micro_batches=number)
    cores = [
        kind(graph, machine, COST, (start,), roles, 3, 1 << 16, 4.0, number, len(every)) for kind in (Core, FullCore)
    ]
    for _ in range(4):
        chosen = tuple(group for group in every if rng.random() < 0.6)
        begun = replace(cores[0].strategy if cores[0].seconds else start, recomputed=chosen)
        for core in cores:
            core.hold_in_memory([1e15] * 4, 0.0)
            core.begin(begun)
            core.hold_in_memory([0.9 * max(core.held)] * 4, 10 * core.seconds)
            core.begin(begun)
            core.explore(60, 0.1 * core.seconds, 0.5)
        core, other = cores
        assert core.strategy == other.strategy
        assert core.seconds == other.seconds
        assert core.strategy.recomputed == chosen
        assert core.held == pytest.approx(held(graph, core.strategy, 4, 4), rel=1e-9, abs=1e-3)
        found, seconds = core.best
        core.hold_in_memory([1e15] * 4, 0.0)
        assert core.begin(found) == pytest.approx(simulate(graph, machine, found, COST), rel=1e-9)
        assert core.seconds <= seconds


def test_strategies_that_a_core_is_not_for() -> None:
    graph = layers()
    core = Core(graph, cluster(1), COST)
    with pytest.raises(ValueError, match="2 micro-batches is not one of 1"):
        core.begin(replace(one_device(graph), micro_batches=2))
    with pytest.raises(ValueError, match="2 groups are recomputed; there is room for 1"):
        core.begin(replace(one_device(graph), recomputed=(("fc0",), ("fc1",))))


# Beside all strategies -------------------------------------------------------------------------------------------


def everything(graph: OperatorGraph, devices: int, numbers: tuple[int, ...]) -> Iterator[Strategy]:
    """All strategies of the space, with all subsets of the groups and all these numbers of micro-batches."""
    for number in numbers:
        spaces = [configs(operator, devices) for operator in micro_batch(graph, number)]
        for chosen in product(*spaces):
            for recomputed in subsets(groups(graph)):
                yield Strategy(tuple(chosen), number, recomputed)


def residual() -> OperatorGraph:
    """A layer whose output is read again behind the next ones."""
    x = features("x", 8, 16)
    first = linear("first", x, 32)
    second = linear("second", first, 32)
    return OperatorGraph("residual", (x, first, second, elementwise("sum", first, second)))


CHAIN, TWICE = layers(width=8), replace(residual(), kept=2.0)
# (graph, share of what one device would need, allowed numbers of micro-batches), and what the best one has:
# (micro-batches, groups that are recomputed)
BEST = {
    (CHAIN, 0.5, (1,)): (1, 1),
    (CHAIN, 0.35, (1, 2, 4)): (2, 1),
    (TWICE, 0.6, (1,)): (1, 1),
    (TWICE, 0.9, (1, 2, 4)): (1, 0),
    (TWICE, 0.6, (1, 2, 4)): (2, 0),
    (TWICE, 0.4, (1,)): (1, 2),
    (CHAIN, 0.4, (1, 2, 4)): (4, 0),
    (CHAIN, 0.6, (1, 2, 4)): (1, 0),
    (CHAIN, 0.35, (1, 4)): (4, 0),
    (TWICE, 0.35, (1, 2, 4)): (4, 0),
}


CASES = [(*case, *found) for case, found in BEST.items()]


@pytest.mark.parametrize(
    ("graph", "share", "numbers", "number", "again"), mostly_slow(CASES, lambda case: case is CASES[2])
)
def test_the_best_of_all(graph: OperatorGraph, share: float, numbers: tuple[int, ...], number: int, again: int) -> None:
    """With parameters that take little."""
    copies = 0.2
    free = cluster(2, bandwidth=1e8)
    machine = with_memory(free, int(share * held(graph, one_device(graph), 2, copies)[0]))
    best = inf
    for one in everything(graph, 2, numbers):
        if max(held(graph, one, 2, copies)) <= machine.devices[0].memory:
            best = min(best, simulate(graph, machine, one, COST))
    assert best < inf
    found = search(graph, machine, COST, budget=1, progress=False, copies=copies, micro_batches=numbers)
    assert found.seconds == pytest.approx(best, rel=1e-12)
    assert simulate(graph, machine, found.strategy, COST) == pytest.approx(best, rel=1e-12)
    assert max(held(graph, found.strategy, 2, copies)) <= machine.devices[0].memory
    assert (found.strategy.micro_batches, len(found.strategy.recomputed)) == (number, again)


def test_nothing_is_recomputed_where_memory_is_enough() -> None:
    found = search(CHAIN, cluster(2), COST, budget=0.2, progress=False, copies=4, micro_batches=(1, 2, 4))
    assert found.strategy.micro_batches == 1
    assert not found.strategy.recomputed
    halves = search(CHAIN, cluster(2), COST, budget=0.2, progress=False, copies=4, micro_batches=(2,))
    assert halves.strategy.micro_batches == 2


def test_micro_batches_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="cannot run in 3 equal micro-batches: its operator 'x' puts out sample 8 S"):
        search(CHAIN, cluster(2), COST, budget=0.2, progress=False, micro_batches=(3,))
    with pytest.raises(ValueError, match="no number of micro-batches is allowed"):
        search(CHAIN, cluster(2), COST, budget=0.2, progress=False, micro_batches=())
    assert micro_batch_numbers(layers(batch=12)) == (1, 2, 3, 4, 6, 12)
    norm = OperatorGraph("norm", (*layers(1).operators, batch_norm("norm", layers(1).operators[-1])))
    assert micro_batch_numbers(norm) == (1,)
