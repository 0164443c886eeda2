"""Options beside a plan or a strategy: those that say otherwise are refused, with what the plan says."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.pipe.options.option_conflicts import refuse_optimizer_sharding

PLAN = Plan(
    "Sequential",
    (StagePlan(("input_1",), "cpu:0", "never"), StagePlan(("tanh",), "cpu:1", "always")),
    2,
    "1f1b",
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunks": 4}, "chunks is 4, and the plan says 2: leave out chunks, or change the plan"),
        ({"schedule": "gpipe"}, "schedule is 'gpipe', and the plan says '1f1b'"),
        ({"schedule": "auto"}, "schedule is 'auto', and the plan says '1f1b'"),
        ({"schedule": "F0 F1 B0 B1\nF0 B0 F1 B1"}, "schedule is 'F0 F1 B0 B1', and the plan says '1f1b'"),
        ({"warmup": (1, 1)}, "warmup is (1, 1), and the plan says all of the schedule, '1f1b'"),
        (
            {"checkpoint": "except_last"},
            "checkpoint is 'except_last', and the plan says 'never', 'always' for its",
        ),
        ({"checkpoint": {0}}, "checkpoint is frozenset({0}), and the plan says 'never', 'always' for its stages"),
        ({"offload": {0}}, "offload is frozenset({0}), and the plan says that nothing waits in host memory"),
        ({"replicas": (2, 1)}, "replicas is (2, 1), and the plan says stage 0 on cpu:0, stage 1 on cpu:1"),
        ({"stages_per_device": 2}, "stages_per_device is 2, and the plan says stage 0 on cpu:0, stage 1 on cpu:1"),
        ({"cut": "time"}, "cut is 'time', and the plan says where its 2 stages begin"),
        ({"cut": [1, 1]}, "cut is (1, 1), and the plan says where its 2 stages begin"),
        ({"cut": []}, "cut is (), and the plan says where its 2 stages begin"),
        ({"cut": ["1"]}, "cut is ('1',), and the plan says where its 2 stages begin"),
        ({"deferred_batch_norm": True}, "deferred_batch_norm is True, and the plan says False"),
    ],
)
def test_what_the_plan_says_otherwise(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)) as found:
        fxpipe.compile(net(), plan=PLAN, **options)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("device", "ranks", "told"),
    [
        ("cpu", False, ""),
        ("cpu", True, ""),
        ("cuda", True, ""),
        ("cuda", False, "in one process the first device of a stage has all of it: start a rank for each device"),
    ],
)
def test_who_can_shard_the_optimizer(device: str, ranks: bool, told: str) -> None:
    stage = StagePlan(("tanh",), f"{device}:0", "never", replicas=(f"{device}:1",))
    plan = Plan("Sequential", (stage,), 2, "1f1b")
    sharded = replace(plan, optimizer_sharding="zero1")
    alone = replace(sharded, stages=(replace(stage, replicas=()),))
    for one in (plan, alone):
        refuse_optimizer_sharding(one, stage.devices, ranks, {})
    with pytest.raises(PlanError, match=re.escape(told)) if told else nullcontext():
        refuse_optimizer_sharding(sharded, stage.devices, ranks, {})


def test_compile_asks_whether_the_optimizer_can_be_sharded() -> None:
    stage = StagePlan(("input_1", "tanh"), "cuda:0", "never", replicas=("cuda:1",))
    plan = Plan("Sequential", (stage,), 2, "1f1b", optimizer_sharding="zero1")
    with pytest.raises(PlanError, match="the plan shards the optimizer's state over replicas"):
        fxpipe.compile(net(), plan=plan)
    fxpipe.compile(net(), plan=plan, devices=["cpu", "cpu"]).close()


@pytest.mark.parametrize(
    ("device", "schedule", "given", "told"),
    [
        ("cpu", "1f1b", {"backward": "autograd"}, ""),
        ("cuda", "1f1b", {}, "on accelerators shard them over the rows of a mesh instead, by pipe.parallelize"),
        ("cpu", "1f1b", {"backward": "code"}, "leave out backward='code', or shard them over the rows of a mesh"),
        ("cpu", "zb-h1", {"compile_stages": True}, "leave out compile_stages and schedule='zb-h1', or"),
    ],
)
def test_what_does_not_go_with_sharded_parameters(device: str, schedule: str, given: dict[str, Any], told: str) -> None:
    stage = StagePlan(("input_1", "tanh"), f"{device}:0", "never", replicas=(f"{device}:1",))
    plan = Plan("Sequential", (stage,), 2, schedule, optimizer_sharding="zero3")
    alone = replace(plan, stages=(replace(stage, replicas=()),))
    for one in (replace(plan, optimizer_sharding="zero1"), alone):
        refuse_optimizer_sharding(one, stage.devices, True, given)
    with pytest.raises(PlanError, match=re.escape(told)) if told else nullcontext():
        refuse_optimizer_sharding(plan, stage.devices, True, given)
    fxpipe.compile(net(), plan=plan, devices=["cpu", "cpu"]).close()  # one memory, with each parameter in it once


def test_the_same_may_be_said_twice() -> None:
    plan = replace(PLAN, stages=tuple(replace(stage, checkpoint="always") for stage in PLAN.stages))
    same: dict[str, Any] = {"chunks": 2, "schedule": "1f1b", "checkpoint": "always", "deferred_batch_norm": False}
    fxpipe.compile(net(), plan=plan, **same, replicas=(1, 1), offload=()).close()


def test_what_a_strategy_says() -> None:
    found = fxpipe.search(net(), fxpipe.Cluster.of(["cpu:0", "cpu:1"]), example_inputs=torch.ones(4, 4), budget=0.1)
    for options in ({"cut": ["1"]}, {"replicas": (1, 1)}, {"offload": {0}}):
        with pytest.raises(PlanError, match=f"{next(iter(options))} is given, and the strategy says where"):
            fxpipe.compile(net(), plan=found, **options)
