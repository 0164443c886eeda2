"""A plan made again from the measured times of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.plan.profile import Profile
from fxpipe.pipe.build.build import draft, predict
from fxpipe.pipe.build.lowering import Lowering
from fxpipe.pipe.results.compare_timelines import Timed, diagnosed
from fxpipe.pipe.results.replanned import Replanned
from tests.helpers.marks import mostly_slow

X, Y = torch.randn(8, 6), torch.randn(8, 6)


def stepped(model: nn.Module, steps: int = 1, **options: Any) -> tuple[fxpipe.Pipe, Tensor]:
    pipe = fxpipe.compile(model, **options)
    for _ in range(steps):
        loss = pipe.step(X, target=Y, loss_fn=F.mse_loss, timeline=True)
    return pipe, loss


def layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Tanh())))


def times(profile: Profile, **factors: float) -> Profile:
    """The profile with other times for the ops of these names."""
    ops = (
        replace(op, forward=op.forward * factors.get(op.name, 1), backward=op.backward * factors.get(op.name, 1))
        for op in profile.ops
    )
    return replace(profile, ops=tuple(ops))


def replanned(pipe: fxpipe.Pipe, profile: Profile, sharding: str = "none") -> Replanned:
    """Planned again after a step that took what the profile says."""
    made = replace(pipe.build, plan=replace(pipe.plan, optimizer_sharding=sharding))
    timeline = predict(replace(made, profile=profile), 4)
    return diagnosed(Timed(made, timeline, ()), None, pipe.options).replan()


@pytest.mark.parametrize(
    "options",
    mostly_slow(
        [
            {"devices": 2, "schedule": "1f1b", "checkpoint": "never"},
            {"devices": 2, "schedule": "interleaved", "checkpoint": {1}},
            {"devices": 3, "schedule": "zb-h1", "replicas": (2, 1)},
        ],
        lambda options: "replicas" in options,
    ),
    ids=lambda options: options["schedule"],
)
def test_all_ops_of_a_stage_are_slower(options: dict[str, Any]) -> None:
    """Then the scaled profile is the true one: the step is predicted as it was, and the plan is that of the truth."""
    pipe, _ = stepped(layers(), chunks=4, **options)
    slow = dict.fromkeys(pipe.plan.stages[-1].ops, 5.0)
    truth = times(pipe.build.profile, **slow)
    found = replanned(pipe, truth)
    assert found.before == pytest.approx(found.measured, rel=1e-9)
    assert found.faster
    assert found.seconds < found.before
    for mine, true in zip(found.profile.ops, truth.ops, strict=True):
        assert (mine.forward, mine.backward) == pytest.approx((true.forward, true.backward), rel=1e-9)
    lowering = Lowering(pipe.build.graph, pipe.options, pipe.build.sizes, {})
    best = draft(pipe.build.graph, truth, pipe.build.sizes, pipe.build.cluster, pipe.options, None, lowering)
    assert found.plan == best.plan != pipe.plan
    assert replanned(pipe, truth, "zero1").plan == replace(found.plan, optimizer_sharding="zero1")
    assert [replace(stage, ops=()) for stage in found.plan.stages] == [
        replace(stage, ops=()) for stage in pipe.plan.stages
    ]
    pipe.close()


def test_a_plan_that_is_best_stays(tmp_path: Path) -> None:
    pipe, _ = stepped(layers(), devices=2, chunks=4)
    found = replanned(pipe, times(pipe.build.profile))
    assert not found.faster
    assert found.plan == pipe.plan
    assert "no other cut is predicted to be faster" in str(found)
    found.save(tmp_path / "plan.json")
    other = fxpipe.compile(layers(), plan=tmp_path / "plan.json", example_inputs=X)  # a call, without the loss
    assert len(other.plan.stages[0].ops) == len(found.plan.stages[0].ops)
    for one in (pipe, other):
        one.close()


def test_a_slow_op_that_the_estimate_does_not_know() -> None:
    """The times of stages are known, not those of their ops; yet with the new cut the same ops take less."""
    model, how = layers(), {"devices": 2, "chunks": 4, "schedule": "1f1b", "checkpoint": "never"}
    pipe, loss = stepped(model, **how, cut=["4"])
    (slow,) = (op.name for op in pipe.build.graph.ops if op.origin.module == "12")
    truth = times(pipe.build.profile, **{slow: 20.0})
    found = replanned(pipe, truth)
    assert found.faster
    assert "a step is predicted to take" in str(found)
    model.zero_grad()
    other, same = stepped(model, plan=found)
    assert other.plan == found.plan
    before, after = (predict(replace(one.build, profile=truth), 4) for one in (pipe, other))
    assert before.makespan == pytest.approx(found.measured, rel=1e-9)
    assert after.makespan < 0.9 * before.makespan
    assert max(after.busy) < 0.9 * max(before.busy)
    torch.testing.assert_close(same, loss, rtol=0, atol=0)
    for one in (pipe, other):
        one.close()


def test_a_strategy_is_not_cut() -> None:
    pipe, _ = stepped(layers(), devices=2, chunks=4)
    timed = pipe._state.timed
    assert timed is not None
    with pytest.raises(PlanError, match=r"search again, with fxpipe\.search"):
        diagnosed(timed, None, replace(pipe.options, place=lambda graph, sizes: None)).replan()  # type: ignore[arg-type,return-value]
    pipe.close()
