"""A tensor of which several devices hold parts gets one owner, which lends the parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import op_name
from fxpipe.ir.operators.group_layout import Layout, OpSharding
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.program import Program
from fxpipe.passes import lower, rewrite_placed
from fxpipe.passes.sharding.share_ops import share
from fxpipe.planning import owners
from fxpipe.planning.stages.device_segments import segments
from tests.helpers.sharded_graphs import sample

LABELS = ("cpu:0", "cpu:1")


def halves() -> Placed:
    """Two layers whose rows two devices share."""
    graph = sample(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4)).graph
    cut = {op.name: OpSharding(op.name, op_name(op), Layout(1)) for op in graph.ops if op_name(op) == "linear"}
    return rewrite_placed(share(graph, {"b": 2}, {op.name: 0 for op in graph.ops}, [(1, 2)], cut), 2)


def program(owned: dict[str, str] | None) -> Program:
    placed = halves()
    stages = tuple(StagePlan(one.ops, LABELS[one.device], "never") for one in segments(placed))
    return lower(placed.graph, Plan("Sequential", stages, 1), segmented=True, owners=owned)


def owned_by(made: Program) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for stage in made.stages:
        for name in stage.states:
            found.setdefault(made.state(name).path, set()).add(stage.device)
    return found


def test_each_tensor_has_one_owner() -> None:
    decided = owners(halves(), LABELS, None)
    assert sorted(decided.values()) == ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]  # each a weight and a bias
    made = program(decided)
    assert owned_by(made) == {path: {label} for path, label in decided.items()}
    assert all(made.devices[loan.home] == decided[made.state(loan.state).path] for loan in made.loans)
    lent = [loan.state for loan in made.loans if made.devices[loan.home] != made.devices[loan.user]]
    assert len(lent) == len(set(lent)) == 4  # one half of each tensor


def test_without_owners_parts_stay_where_they_are() -> None:
    assert owned_by(program(None)) == {path: set(LABELS) for path in owned_by(program(None))}


def test_later_calls_follow_the_first() -> None:
    known = {"0.weight": "cpu:1"}
    assert owners(halves(), LABELS, known) == dict.fromkeys(("0.bias", "1.weight", "1.bias"), "cpu:0") | known


def test_an_owner_that_does_nothing() -> None:
    with pytest.raises(PlanError, match=r"cpu:7 owns 0\.weight and has no stage in the plan"):
        program({"0.weight": "cpu:7"})


def test_what_forward_writes_elsewhere_goes_home_after_the_call() -> None:
    graph = sample(nn.BatchNorm1d(4), torch.zeros(2, 4)).graph
    placed = Placed(graph, {op.name: 1 for op in graph.ops})
    assert set(owners(placed, LABELS, None).values()) == {"cpu:1"}
    first, *others = (op.name for op in graph.ops)
    stages = StagePlan((), LABELS[0], "never"), StagePlan((first, *others), LABELS[1], "never")
    made = lower(graph, Plan("BatchNorm1d", stages, 1), segmented=True, owners={"num_batches_tracked": "cpu:0"})
    (loan,) = made.written_loans
    assert (made.state(loan.state).path, loan.home, loan.user) == ("num_batches_tracked", 0, 1)
    assert loan.state in made.stages[1].states
    assert "0 -> 1  once a step, and back" in str(made)
