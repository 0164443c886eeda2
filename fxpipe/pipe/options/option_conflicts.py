"""What does not go with a plan or a strategy: options that decide the same thing, and processes that cannot do what the
plan says. It is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.ir.plan.model_states import ZERO
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.plan_file import PlanFile, StagePlace
from fxpipe.schedules.make_schedule import SPLIT

SAID_BY_STRATEGY = (
    "replicas", "stages_per_device", "cut", "offload", "profile", "deferred_batch_norm",
)  # fmt: skip


def refuse_beside_strategy(given: Mapping[str, Any], strategy: Strategy | None) -> None:
    """Raise PlanError if one of the `given` options decides something that the strategy decides. `strategy`: None for a
    function that places ops."""
    if told := [name for name in SAID_BY_STRATEGY if given.get(name)]:
        raise PlanError(f"{told[0]} is given, and the strategy says where everything runs: leave out {told[0]}")
    chunks, checkpoint = given.get("chunks"), given.get("checkpoint")
    if strategy and strategy.micro_batches > 1 and chunks not in (None, strategy.micro_batches):
        raise PlanError(
            f"chunks is {chunks}, and the strategy is for {strategy.micro_batches} micro-batches: leave out chunks, or "
            "search with other micro_batches"
        )
    if strategy and strategy.recomputed and checkpoint not in (None, "never"):
        raise PlanError(
            f"checkpoint is {_shown(checkpoint)}, and the strategy says what is recomputed: leave out checkpoint"
        )


def refuse_beside_plan(plan: Plan | PlanFile, given: Mapping[str, Any]) -> None:
    """Raise PlanError if one of the `given` options contradicts the plan."""
    for name, (holds, says) in _said_by(plan).items():
        asked = given.get(name)
        if asked is not None and asked not in (holds, frozenset()):
            raise PlanError(
                f"{name} is {_shown(asked)}, and the plan says {says}: leave out {name}, or change the plan, as in its "
                "JSON file"
            )


def refuse_optimizer_sharding(
    plan: Plan | PlanFile, devices: Collection[str], ranks: bool, given: Mapping[str, Any]
) -> None:
    """Raise PlanError if the plan shards the optimizer's state over replicas, or with ZeRO-3 also parameters, and one
    of them would have all of it; or if ranks cannot run it so with the `given` options.

    `devices` are those that stand for the plan's, `ranks` is whether each is a rank. CPU workers of one process have
    one memory, with each parameter and its state in it once, whatever the plan shards. Over ranks, the optimizer may
    shard its state (`RankPipe.replica_group`), and with tensor parallelism it is always sharded: each parameter has one
    owner among all replicas."""
    placed: tuple[StagePlan | StagePlace, ...] = plan.stages
    shards = plan.optimizer_sharding != "none" and any(stage.replicas for stage in placed)
    if shards and not ranks and not all(label.startswith("cpu") for label in devices):
        raise PlanError(
            f"the plan shards the optimizer's state over replicas ({ZERO[plan.optimizer_sharding]}), and in one "
            "process the first device of a stage has all of it: start a rank for each device, or plan with "
            "optimizer_sharding='none'"
        )
    if shards and ranks and plan.optimizer_sharding == "zero3":
        _refuse_beside_sharded_parameters(plan, devices, given)


def _refuse_beside_sharded_parameters(
    plan: Plan | PlanFile, devices: Collection[str], given: Mapping[str, Any]
) -> None:
    """Raise PlanError on accelerators, and if one of the `given` options does not go with ZeRO-3: stages gather
    parameters op by op, and autograd reduce-scatters their gradients."""
    mesh = "pipe.parallelize(mesh['dp'], lambda part, dp: fully_shard(part, mesh=dp)) on a plan without replicas"
    if not all(label.startswith("cpu") for label in devices):
        raise PlanError(
            "the plan shards parameters over replicas (ZeRO-3), which runs over ranks on CPUs so far: on accelerators "
            f"shard them over the rows of a mesh instead, by {mesh}"
        )
    found = [name for name in ("compile_stages", "overlap_pairs") if given.get(name)]
    if given.get("backward") == "code":
        found.append("backward='code'")
    if isinstance(plan, Plan) and any(stage.tensor_parallel > 1 for stage in plan.stages):
        found.append("tensor_parallel in the plan")
    if plan.schedule in SPLIT:
        found.append(f"schedule={plan.schedule!r}")
    if any(stage.offload for stage in plan.stages):
        found.append("offload")
    if found:
        raise PlanError(
            "the plan shards parameters over replicas (ZeRO-3), which are gathered for each op, and autograd "
            f"reduce-scatters their gradients in one action: leave out {' and '.join(found)}, or shard them over the "
            f"rows of a mesh, by {mesh}"
        )


def _said_by(plan: Plan | PlanFile) -> dict[str, tuple[Any, str]]:
    """For each option that the plan decides: the value that agrees with the plan (None: none does), and words for an
    error."""
    placed: tuple[StagePlan | StagePlace, ...] = plan.stages
    modes = [stage.checkpoint for stage in placed]
    mode = modes[0] if len(set(modes)) == 1 else None
    offloaded = frozenset(index for index, stage in enumerate(placed) if stage.offload)
    stages = f"where its {len(plan.stages)} stages begin"
    replica_groups = ", ".join(f"stage {index} on {' and '.join(stage.devices)}" for index, stage in enumerate(placed))
    return {
        "chunks": (plan.chunks, str(plan.chunks)),
        "schedule": (plan.schedule, _shown(plan.schedule)),
        "warmup": (None, f"all of the schedule, {_shown(plan.schedule)}"),
        "checkpoint": (mode, ", ".join(map(repr, modes)) + (" for its stages" if len(modes) > 1 else "")),
        "memory_limit": (None, ", ".join(map(repr, modes)) + " for its stages"),
        "offload": (offloaded, f"{sorted(offloaded)}" if offloaded else "that nothing waits in host memory"),
        "replicas": (tuple(len(stage.devices) for stage in placed), replica_groups),
        "stages_per_device": (None, replica_groups),
        "cut": (None, stages),
        "deferred_batch_norm": (plan.deferred_batch_norm, str(plan.deferred_batch_norm)),
    }


def _shown(value: Any) -> str:
    """A value as an error shows it: at most 60 characters of its first line."""
    first = str(value).strip().partition("\n")[0][:60]
    return repr(first) if isinstance(value, str) else first
