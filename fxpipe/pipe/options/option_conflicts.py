"""What does not go with a plan or a strategy: options that decide the same thing, and processes that cannot do what the
plan says. It is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.plan_file import PlanFile, StagePlace

SAID_BY_STRATEGY = (
    "plan", "replicas", "stages_per_device", "balance", "split_at", "offload", "profile", "deferred_batch_norm",
)  # fmt: skip


def refuse_beside_strategy(given: Mapping[str, Any], strategy: Strategy | None) -> None:
    """Raise PlanError if one of the `given` options decides something that the strategy decides. `strategy`: None for a
    function that places ops."""
    if told := [name for name in SAID_BY_STRATEGY if given.get(name)]:
        raise PlanError(
            f"{' and '.join(told)} beside strategy: the strategy says where everything runs; leave out one of them"
        )
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
        if asked is not None and asked not in (holds, (), frozenset()):
            raise PlanError(
                f"{name} is {_shown(asked)}, and the plan says {says}: leave out {name}, or change the plan, as in its "
                "JSON file"
            )


def refuse_optimizer_sharding(plan: Plan | PlanFile, devices: Collection[str], ranks: bool) -> None:
    """Raise PlanError if the plan shards the optimizer's state over replicas, and one of them would have all of it.

    `devices` are those that stand for the plan's, `ranks` is whether each is a rank. CPU workers of one process have
    one memory, with the state in it once. Over ranks, the optimizer may shard it (`RankPipe.replica_group`), and with
    tensor parallelism it is always sharded: each parameter has one owner among all replicas."""
    placed: tuple[StagePlan | StagePlace, ...] = plan.stages
    shards = plan.optimizer_sharding != "none" and any(stage.replicas for stage in placed)
    if shards and not ranks and not all(label.startswith("cpu") for label in devices):
        raise PlanError(
            "the plan shards the optimizer's state over replicas (ZeRO-1), and in one process the first device of a "
            "stage has all of it: start a rank for each device, or plan with optimizer_sharding='none'"
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
        "offload": (offloaded, f"{sorted(offloaded)}" if offloaded else "that nothing waits in host memory"),
        "replicas": (tuple(len(stage.devices) for stage in placed), replica_groups),
        "stages_per_device": (None, replica_groups),
        "balance": (None, stages),
        "split_at": (None, stages),
        "deferred_batch_norm": (plan.deferred_batch_norm, str(plan.deferred_batch_norm)),
    }


def _shown(value: Any) -> str:
    """A value as an error shows it: at most 60 characters of its first line."""
    first = str(value).strip().partition("\n")[0][:60]
    return repr(first) if isinstance(value, str) else first
