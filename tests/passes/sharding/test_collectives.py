"""What all devices of a group make of their parts becomes a collective; their calls are proven to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.errors import PackageError
from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.operators.collective_patterns import CollectivePattern, collective_patterns
from fxpipe.ir.operators.group_layout import Layout, OpSharding
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.device_programs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, DevicePrograms, GroupCall, Step
from fxpipe.ir.program.device_programs import check as check_programs
from fxpipe.ir.program.program import Collective, Program, check
from fxpipe.ir.program.transfers import add_transfers
from fxpipe.passes import lower, rewrite_placed
from fxpipe.passes.sharding.share_ops import share
from fxpipe.planning.stages.device_segments import segments
from fxpipe.schedules.make_schedule import make
from fxpipe.schedules.stage_segments import segmented
from tests.helpers.marks import mostly_slow
from tests.helpers.sharded_graphs import sample


@cache
def placed(degree: int, between: int | None = None, batch: int = 4) -> Placed:
    """Two layers, columns and then rows, twice. The sum of the first pair is on all devices, or cut along dimension
    `between`; the second pair's is cut along the batch."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    graph = sample(model, torch.zeros(batch, 8)).graph
    columns = [op.name for op in graph.ops if op_name(op) == "linear"]
    cut = {name: OpSharding(name, "linear", Layout(0 if at % 2 else 1), at % 2) for at, name in enumerate(columns)}
    cut[columns[1]] = replace(cut[columns[1]], layout=Layout(between))
    stages = {op.name: 0 for op in graph.ops}
    return rewrite_placed(share(graph, {"b": batch}, stages, [(1, degree)], cut, whole_sums=True), degree)


@cache
def program(degree: int, between: int | None = None, ranks: bool = True) -> Program:
    found = placed(degree, between)
    patterns = collective_patterns(found) if ranks else ()
    labels = [f"cpu:{at}" for at in range(degree)]
    stages = tuple(StagePlan(one.ops, labels[one.device], "never") for one in segments(found, None, patterns))
    return lower(found.graph, Plan("Sequential", stages, 2), segmented=True, patterns=patterns)


@cache
def programs(degree: int, between: int | None = None, schedule: str = "forward-only") -> DevicePrograms:
    made = program(degree, between)
    labels = dict(zip(made.pipeline, made.devices, strict=True))
    coarse = make(schedule, [labels[stage] for stage in range(len(labels))], 2)
    return add_transfers(segmented(coarse, made.pipeline, made.devices, made.sources), made)


SEVERAL = mostly_slow([(2, None), (2, 0), (4, 1), (4, 0)], {(2, None), (2, 0)}.__contains__)
AT_ONCE, IN_TURN = (ALL_REDUCE, REDUCE_SCATTER), (REDUCE_SCATTER, ALL_GATHER, REDUCE_SCATTER)


@pytest.mark.parametrize(("degree", "between"), SEVERAL)
def test_parts_are_exchanged_by_one_call_of_all_devices(degree: int, between: int | None) -> None:
    """A sum that all need; or a slice of it for each, and then the whole of these."""
    made, plain = program(degree, between), program(degree, between, ranks=False)
    kinds = AT_ONCE if between is None else IN_TURN
    assert tuple(one.kind for one in made.collectives) == kinds
    assert [one.dim for one in made.collectives] == [between or 0, *([0] if between is None else [between, 0])]
    assert plain.collectives == ()
    for one in made.collectives:
        assert [made.stages[move.source].device for move in one.moves] == [f"cpu:{at}" for at in range(degree)]
        assert len({move.value for move in one.moves}) == len({move.part for move in one.moves}) == degree
        targets = {move.target for move in one.moves}
        assert all({move.source for move in one.moves} <= {*made.sources[target]} for target in targets)
    crossing = lambda p: sum(  # noqa: E731
        p.devices[m.source] != p.devices[m.target] for m in p.moves if m.source >= 0 and m.target < len(p.stages)
    )
    assert crossing(plain) - crossing(made) == len(kinds) * degree * (degree - 1)
    found = programs(degree, between)
    check_programs(found)
    for row in found.rows:  # for each micro-batch
        assert [step.do for step in row if isinstance(step.what, GroupCall)].count(REDUCE_SCATTER) == 2 * kinds.count(
            REDUCE_SCATTER
        )
    assert f"{kinds[0]}  " in str(found)


def test_backward_is_the_transposed_collective() -> None:
    """Of a slice of a sum the whole gradient is gathered, of a whole the slice of the sum of the gradients is taken."""
    found = programs(2, 0, "1f1b")
    check_programs(found)
    calls = [step.what for step in found.rows[0] if isinstance(step.what, GroupCall) and step.what.micro_batch == 0]
    forward, back = ([one.kind for one in calls if one.messages[0].gradient == way] for way in (False, True))
    assert tuple(forward) == IN_TURN
    assert tuple(back) == (ALL_GATHER, REDUCE_SCATTER, ALL_GATHER)


def test_slices_of_other_sizes_stay_messages() -> None:
    """Of 5 samples, two devices have 3 and 2."""
    assert [one.kind for one in collective_patterns(placed(2, None, 5))] == [ALL_REDUCE]
    assert not collective_patterns(placed(2, 0, 5))
    assert [one.dim for one in collective_patterns(placed(2, 1, 5))] == [1, 1]


@pytest.mark.parametrize("kind", [ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER])
def test_what_else_is_read_stays_a_message(kind: str) -> None:
    """A partial sum that something else uses, too, is sent as it is; as is what not all devices of a group need."""
    found = placed(2, None if kind == ALL_REDUCE else 0)

    def kinds(*ops: Op, **devices: int) -> list[CollectivePattern]:
        changed = replace(found, graph=replace(found.graph, ops=ops), devices={**found.devices, **devices})
        return [one for one in collective_patterns(changed) if one.kind == kind and one.parts == first.parts]

    first = next(one for one in collective_patterns(found) if one.kind == kind)
    ops = found.graph.ops
    assert kinds(*ops)
    assert not kinds(*(op for op in ops if op.name != first.results[1]))
    result = next(op for op in ops if op.name == first.results[0])
    assert not kinds(*ops, replace(result, name="extra"), extra=0)  # twice on one device
    assert not kinds(*ops, **{first.results[0]: 1})  # both on one device
    other = replace(result, name="extra", target=torch.relu, args=(Ref(first.parts[0]),))
    assert bool(kinds(*ops, other, extra=0)) == (kind == ALL_GATHER)  # who has a slice may read it


def changed(device: int, change: Callable[[list[Step]], list[Step]]) -> DevicePrograms:
    found = programs(2)
    rows = list(found.rows)
    rows[device] = tuple(change(list(rows[device])))
    return replace(found, rows=tuple(rows))


def first(row: list[Step]) -> Step:
    return next(step for step in row if isinstance(step.what, GroupCall))


def late(row: list[Step]) -> list[Step]:
    return [*(step for step in row if step != first(row)), first(row)]


def early(row: list[Step]) -> list[Step]:
    return [first(row), *(step for step in row if step != first(row))]


def swapped(row: list[Step]) -> list[Step]:
    """Both sums after all actions that make parts, the second one first."""
    sums = [step for step in row if isinstance(step.what, GroupCall)]
    at = {step: sums[1 - number] for number, step in enumerate(sums)}
    return [at.get(step, step) for step in row]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: [step for step in row if step != first(row)], "cpu:0: no device gives the part"),
        (late, "before the part is made, or after the result is taken"),
        (early, "before the part is made, or after the result is taken"),
        (swapped, "before the part is made, or after the result is taken|waits for ever"),
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
        sums = [step for step in row if step.do == ALL_REDUCE]
        rest = [step for step in row if step not in made and step not in sums]
        rows.append((*made, *(sums[::-1] if device else sums), *rest))
    with pytest.raises(ValueError, match="waits for ever for"):
        check_programs(replace(found, rows=tuple(rows)))
    same = [tuple(rows[0]), (*rows[1][:2], *rows[1][2:4][::-1], *rows[1][4:])]
    check_programs(replace(found, rows=tuple(same)))


def test_a_program_with_odd_sums_is_refused() -> None:
    made = program(2)
    one = made.collectives[0]
    for moves, message in (
        ((one.moves[0], one.moves[0]), "within a device of its own"),
        ((replace(one.moves[0], target=one.moves[1].target), one.moves[1]), "within a device of its own"),
        ((replace(one.moves[0], value="input"), one.moves[1]), "these are not all moves"),
    ):
        with pytest.raises(ValueError, match=message):
            check(replace(made, collectives=(Collective(one.kind, moves),)))
    with pytest.raises(ValueError, match="the types of the values do not fit it"):
        check(replace(made, collectives=(Collective(ALL_GATHER, one.moves),)))


def test_such_stages_run_over_ranks_alone() -> None:
    class Scheduler(StepScheduler):
        devices = ("cpu:0", "cpu:1", "cpu:0", "cpu:1")
        collectives = (("all-reduce", ("y", 0, 2), ("y_0", 1, 3)),)

    with pytest.raises(PackageError, match="load it over 2 ranks"):
        Scheduler(())
