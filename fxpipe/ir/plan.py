"""Every decision about how a model runs, and nothing else: which ops form which stage, where each stage runs, how many
micro-batches there are, and what is recomputed. A plan is data: it is written to JSON, read, edited and compared."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

CHECKPOINT_MODES = ("never", "except_last", "always")


@dataclass(frozen=True)
class StagePlan:
    """One stage: its ops by name, in the order they run, its device, when it recomputes ("never", "except_last": all
    micro-batches but the last, or "always"), and whether what it keeps for backward waits in host memory. `replicas`
    are further devices that run the same stage, each with an equal share of every micro-batch."""

    ops: tuple[str, ...]
    device: str
    checkpoint: str
    offload: bool = False
    replicas: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.replicas)


@dataclass(frozen=True)
class Plan:
    """The stages in pipeline order, the number of micro-batches and the schedule, by name or as a grid, for the model
    named `model`."""

    model: str
    stages: tuple[StagePlan, ...]
    chunks: int
    schedule: str = "gpipe"
    deferred_batch_norm: bool = False

    def __str__(self) -> str:
        return show(self)


def stage_of(plan: Plan) -> dict[str, int]:
    """The stage that each op belongs to."""
    return {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}


def check(plan: Plan, ops: Collection[str]) -> None:
    """Raise ValueError if the plan is not one for a graph of these ops: it must place each of them once."""
    if plan.chunks < 1:
        raise ValueError(f"chunks is {plan.chunks}; a plan needs at least one micro-batch")
    if not plan.stages:
        raise ValueError("the plan has no stages")
    placed: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        if stage.checkpoint not in CHECKPOINT_MODES:
            raise ValueError(f"stage {index}: checkpoint is {stage.checkpoint!r}, not one of {CHECKPOINT_MODES}")
        if not stage.ops:
            raise ValueError(f"stage {index} has no ops")
        for op in stage.ops:
            if op in placed:
                raise ValueError(f"op {op!r} is in stage {placed[op]} and in stage {index}")
            placed[op] = index
    _same_ops(placed.keys(), set(ops))


def _same_ops(planned: Collection[str], captured: Collection[str]) -> None:
    missing, unknown = sorted(set(captured) - set(planned)), sorted(set(planned) - set(captured))
    if not missing and not unknown:
        return
    facts = []
    if unknown:
        facts.append(f"{len(unknown)} of its ops are not in the model ({', '.join(unknown[:3])}, ...)")
    if missing:
        facts.append(f"it places {len(captured) - len(missing)} of the model's {len(captured)} ops")
    raise ValueError("the plan is for another model: " + "; ".join(facts))


def show(plan: Plan) -> str:
    """One stage per line."""
    schedule = plan.schedule.split(":")[0]
    head = f"{plan.model}: {len(plan.stages)} stages, {plan.chunks} micro-batches, {schedule}"
    lines = [
        f"  stage {index} on {', '.join(stage.devices)}: {_ops(stage)}, recompute {stage.checkpoint}"
        for index, stage in enumerate(plan.stages)
    ]
    return "\n".join([head, *lines])


def _ops(stage: StagePlan) -> str:
    return f"{len(stage.ops)} ops, {stage.ops[0]} .. {stage.ops[-1]}" if stage.ops else "no ops"


def dump(plan: Plan) -> str:
    """The plan as JSON text, one op list per line; `load` reads it back."""
    data: dict[str, Any] = asdict(plan)
    written = [{key: value for key, value in e.items() if value or key != "replicas"} for e in data.pop("stages")]
    stages = ",\n".join("  " + json.dumps(stage) for stage in written)
    head = json.dumps(data, indent=1).rstrip("}").rstrip()
    return f'{head},\n "stages": [\n{stages}\n ]\n}}\n'


def load(text: str) -> Plan:
    """The plan that `dump` wrote, or the one in the file of a planner, which may say under "planned" what it was made
    for. Raises ValueError for text that is not one."""
    try:
        data = json.loads(text)
        data.pop("planned", None)
        stages = tuple(_stage(stage) for stage in data.pop("stages"))
        return Plan(stages=stages, **data)
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a plan: {error!r}") from None


def _stage(data: dict[str, Any]) -> StagePlan:
    return StagePlan(**{**data, "ops": tuple(data["ops"]), "replicas": tuple(data.get("replicas", ()))})
