"""Sums that each device of a group has parts of, and needs, become all-reduces; their calls are proven to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.errors import PackageError
from fxpipe.ir.graph.graph import op_name
from fxpipe.ir.operators.group_layout import Layout, OpSharding
from fxpipe.ir.operators.partial_sums import partial_sums
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.device_programs import DevicePrograms, Parts, Step
from fxpipe.ir.program.device_programs import check as check_programs
from fxpipe.ir.program.program import AllReduce, Program, check
from fxpipe.ir.program.transfers import add_transfers
from fxpipe.passes import lower, rewrite_placed
from fxpipe.passes.sharding.share_ops import share
from fxpipe.planning.stages.device_segments import segments
from fxpipe.schedules.make_schedule import make
from fxpipe.schedules.stage_segments import segmented
from tests.helpers.marks import mostly_slow
from tests.helpers.sharded_graphs import sample


@cache
def placed(degree: int) -> Placed:
    """Two layers, columns and then rows, twice; the sum of the first pair is on all devices."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    graph = sample(model, torch.zeros(4, 8)).graph
    columns = [op.name for op in graph.ops if op_name(op) == "linear"]
    cut = {name: OpSharding(name, "linear", Layout(0 if at % 2 else 1), at % 2) for at, name in enumerate(columns)}
    cut[columns[1]] = replace(cut[columns[1]], layout=Layout(None))
    stages = {op.name: 0 for op in graph.ops}
    return rewrite_placed(share(graph, {"b": 4}, stages, [1], cut, degree, whole_sums=True), degree)


@cache
def program(degree: int, ranks: bool = True) -> Program:
    found = placed(degree)
    sums = partial_sums(found) if ranks else ()
    labels = [f"cpu:{at}" for at in range(degree)]
    stages = tuple(StagePlan(one.ops, labels[one.device], "never") for one in segments(found, None, sums))
    return lower(found.graph, Plan("Sequential", stages, 2), segmented=True, sums=sums)


def programs(degree: int) -> DevicePrograms:
    made = program(degree)
    labels = dict(zip(made.pipeline, made.devices, strict=True))
    coarse = make("forward-only", [labels[stage] for stage in range(len(labels))], 2)
    return add_transfers(segmented(coarse, made.pipeline, made.devices, made.sources), made)


@pytest.mark.parametrize("degree", mostly_slow([2, 4], {2}.__contains__))
def test_a_sum_is_one_call_of_all_devices(degree: int) -> None:
    made, plain = program(degree), program(degree, ranks=False)
    (one,) = made.sums
    assert plain.sums == ()
    assert [made.stages[move.source].device for move in one.moves] == [f"cpu:{at}" for at in range(degree)]
    assert len({move.value for move in one.moves}) == degree
    crossing = lambda p: sum(  # noqa: E731
        p.devices[m.source] != p.devices[m.target] for m in p.moves if m.source >= 0 and m.target < len(p.stages)
    )
    assert crossing(plain) - crossing(made) == degree * (degree - 1)
    targets = {move.target for move in one.moves}
    assert all({move.source for move in one.moves} <= {*made.sources[target]} for target in targets)
    found = programs(degree)
    check_programs(found)
    assert all(sum(isinstance(step.what, Parts) for step in row) == 2 for row in found.rows)  # for each micro-batch
    assert "all-reduce  " in str(found)


def test_what_else_is_read_stays_a_message() -> None:
    """A part that something else uses, too, is sent as it is; as are sums that not all devices of a group need."""
    found = placed(2)
    (one,) = partial_sums(found)
    ops = list(found.graph.ops)
    fewer = [op for op in ops if op.name != one.sums[1]]
    assert not partial_sums(replace(found, graph=replace(found.graph, ops=tuple(fewer))))
    extra = replace(next(op for op in ops if op.name == one.sums[0]), name="extra")
    devices = {**found.devices, "extra": 0}
    assert not partial_sums(replace(found, graph=replace(found.graph, ops=(*ops, extra)), devices=devices))


def changed(device: int, change: Callable[[list[Step]], list[Step]]) -> DevicePrograms:
    found = programs(2)
    rows = list(found.rows)
    rows[device] = tuple(change(list(rows[device])))
    return replace(found, rows=tuple(rows))


def first(row: list[Step]) -> Step:
    return next(step for step in row if isinstance(step.what, Parts))


def late(row: list[Step]) -> list[Step]:
    return [*(step for step in row if step != first(row)), first(row)]


def early(row: list[Step]) -> list[Step]:
    return [first(row), *(step for step in row if step != first(row))]


def swapped(row: list[Step]) -> list[Step]:
    """Both sums after all actions that make parts, the second one first."""
    sums = [step for step in row if isinstance(step.what, Parts)]
    at = {step: sums[1 - number] for number, step in enumerate(sums)}
    return [at.get(step, step) for step in row]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: [step for step in row if step != first(row)], "cpu:0: no device gives the part"),
        (late, "before the part is made, or after the sum is taken"),
        (early, "before the part is made, or after the sum is taken"),
        (swapped, "before the part is made, or after the sum is taken|waits for ever"),
    ],
)
def test_faults_are_found(change: Callable[[list[Step]], list[Step]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_programs(changed(1, change))


def test_calls_in_another_order_wait_for_ever() -> None:
    """Of two sums that both devices could begin, each begins another one first."""
    found = programs(2)
    rows = []
    for device, row in enumerate(found.rows):
        runs = [step for step in row if step.do == "run"]
        made = [step for step in runs if step.what.stage == runs[0].what.stage]  # type: ignore[union-attr]
        sums = [step for step in row if isinstance(step.what, Parts)]
        rest = [step for step in row if step not in made and step not in sums]
        rows.append((*made, *(sums[::-1] if device else sums), *rest))
    with pytest.raises(ValueError, match="waits for ever for"):
        check_programs(replace(found, rows=tuple(rows)))
    same = [tuple(rows[0]), (*rows[1][:2], *rows[1][2:4][::-1], *rows[1][4:])]
    check_programs(replace(found, rows=tuple(same)))


def test_a_program_with_odd_sums_is_refused() -> None:
    made = program(2)
    (one,) = made.sums
    for moves, message in (
        ((one.moves[0], one.moves[0]), "within a device of its own"),
        ((replace(one.moves[0], target=one.moves[1].target), one.moves[1]), "within a device of its own"),
        ((replace(one.moves[0], value="input"), one.moves[1]), "these are not all moves"),
    ):
        with pytest.raises(ValueError, match=message):
            check(replace(made, sums=(AllReduce(moves),)))


def test_such_stages_run_over_ranks_alone() -> None:
    class Scheduler(StepScheduler):
        all_reduces = ((("y", 0, 2), ("y_0", 1, 3)),)

    with pytest.raises(PackageError, match="load it over as many ranks"):
        Scheduler(())
