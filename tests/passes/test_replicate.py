"""Replicas: which moves are cut between samples, along what, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.program.program import Program, recut
from fxpipe.passes import cut
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.portals import portals
from fxpipe.passes.replicate import replicate
from tests.helpers.nets import Skips, make, plan
from tests.helpers.pass_graphs import trace


def replicated(samples: dict[str, int | None], *counts: int) -> Program:
    model, x = make(Skips)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, len(graph.ops) - 4)
    further = [tuple(f"cpu:{s}{k}" for k in range(1, count)) for s, count in enumerate(counts)]
    stages = tuple(replace(stage, replicas=own) for stage, own in zip(chosen.stages, further, strict=True))
    return replicate(
        portals(cut(graph, chosen), PassContext(chosen)), PassContext(replace(chosen, stages=stages), samples)
    )


def test_values_between_different_numbers_are_cut_and_others_stay_whole() -> None:
    program = replicated({"tanh": 0, "linear_1": None}, 2, 2, 3)
    assert [len(stage.devices) for stage in program.stages] == [2, 2, 3]
    inner = [move for move in program.moves if 0 <= move.source < move.target < 3]
    assert {(move.value, move.source, move.target): (recut(move, program), move.dim) for move in inner} == {
        ("tanh", 0, 1): (False, None),
        ("tanh", 0, 2): (True, 0),
        ("linear_1", 1, 2): (True, None),
    }
    assert "stage 0 on cpu:0, cpu:01, recompute" in str(program)
    assert "tanh  0 -> 2  portal  along 0" in str(program)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"tanh, f64\[b, 4\].* goes from stage 0, on cpu:0, cpu:01, to stage 1, on cpu:1,"
    ):
        replicated({}, 2, 1, 1)
