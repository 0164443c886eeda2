"""Every decision about how a model runs, and nothing else: which ops form which stage, where each stage runs, how many
micro-batches there are, and what is recomputed. A plan is data: it is written to JSON, read, edited and compared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fxpipe.ir.cluster.device_labels import Label
from fxpipe.ir.dataclass_json import at_least, from_plain, one_of, parse, to_plain, write
from fxpipe.ir.drawable import Drawable
from fxpipe.ir.units import count

from .model_states import OPTIMIZER_SHARDINGS

CHECKPOINT_MODES = ("never", "selective", "except_last", "always")
FORWARD_AGAIN = ("except_last", "always")  # the modes in which all of a stage's forward runs a second time
WHOLE_MODES = ("never", *FORWARD_AGAIN)  # those that hold for all of a stage
MOST_CHUNKS = 4096  # micro-batches of a batch: a schedule's code and the time to plan grow with them
Mode = Annotated[str, one_of(*CHECKPOINT_MODES)]
Sharding = Annotated[str, one_of(*OPTIMIZER_SHARDINGS)]
Chunks = Annotated[int, at_least(1, MOST_CHUNKS)]


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    - `ops`: their names, in the order they run.
    - `device`: where it runs.
    - `checkpoint`: what it recomputes: nothing ("never"), what is cheap ("selective"), or all of its forward, for all
      micro-batches but the last ("except_last") or for all ("always").
    - `offload`: whether what it keeps for backward waits in host memory.
    - `replicas`: further devices that run the same stage, each for its slice of every micro-batch.
    - `tensor_parallel`: over how many devices each op is cut; `device` and `replicas` are the first of each such group.
    """

    ops: tuple[str, ...]
    device: Label
    checkpoint: Mode
    offload: bool = False
    replicas: tuple[Label, ...] = ()
    tensor_parallel: Annotated[int, at_least(1)] = 1

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.replicas)


@dataclass(frozen=True)
class Plan(Drawable):
    """How a model runs. Print with `str`.

    - `model`: its name.
    - `stages`: in pipeline order.
    - `chunks`: the number of micro-batches.
    - `schedule`: the name of the schedule, or its grid.
    - `deferred_batch_norm`: as in `fxpipe.compile`.
    - `optimizer_sharding`: what the replicas of a stage share out: "none"; "zero1": the optimizer's state; "zero3":
      also parameters and gradients.
    """

    model: str
    stages: tuple[StagePlan, ...]
    chunks: Chunks
    schedule: str = "gpipe"
    deferred_batch_norm: bool = False
    optimizer_sharding: Sharding = "none"

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows


def stage_of(plan: Plan) -> dict[str, int]:
    """The stage that each op belongs to."""
    return {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}


def with_modes(plan: Plan, modes: Sequence[str]) -> Plan:
    """The plan with the checkpoint mode of each stage."""
    stages = (replace(stage, checkpoint=mode) for stage, mode in zip(plan.stages, modes, strict=True))
    return replace(plan, stages=tuple(stages))


def replica_groups(plan: Plan) -> dict[str, tuple[str, ...]]:
    """All devices of each stage, by the stage's first device."""
    return {stage.device: stage.devices for stage in plan.stages}


def without_replicas(plan: Plan) -> Plan:
    """The plan as calls of the pipe run it: on the first device of each stage."""
    return replace(plan, stages=tuple(replace(stage, replicas=()) for stage in plan.stages))


def check(plan: Plan, ops: Collection[str]) -> None:
    """Raise ValueError if the plan is not one for a graph of these ops: it must place each of them once."""
    for index, stage in enumerate(plan.stages):
        if stage.tensor_parallel > 1:
            raise ValueError(
                f"it cuts each op of stage {index} over {stage.tensor_parallel} devices, but does not say how: give "
                "what fxpipe.plan returned, or the file that it was saved in"
            )
    if plan.chunks < 1:
        raise ValueError(f"chunks is {plan.chunks}; a plan needs at least one micro-batch")
    if not plan.stages:
        raise ValueError("the plan has no stages")
    placed: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        if stage.checkpoint not in CHECKPOINT_MODES:
            raise ValueError(f"stage {index}: checkpoint is {stage.checkpoint!r}, not one of {CHECKPOINT_MODES}")
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
    stages, chunks = count(len(plan.stages), "stage", "stages"), count(plan.chunks, "micro-batch", "micro-batches")
    head = f"{plan.model}: {stages}, {chunks}, {schedule}"
    lines = [
        f"  stage {index} on {', '.join(stage.devices)}: {_ops(stage)}, recompute {stage.checkpoint}"
        for index, stage in enumerate(plan.stages)
    ]
    return "\n".join([head, *lines])


def _ops(stage: StagePlan) -> str:
    return f"{count(len(stage.ops), 'op', 'ops')}, {stage.ops[0]} .. {stage.ops[-1]}" if stage.ops else "no ops"


def dump(plan: Plan) -> str:
    """The plan as JSON text; `load` reads it back."""
    return write(plain(plan), 3)


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as files have it, the stages last."""
    data = to_plain(plan)
    stages = data.pop("stages")
    return {**data, "stages": stages}


def load(text: str) -> Plan:
    """The plan that `dump` or a planner wrote. What a planner says under "planned" is ignored. Raises ValueError for
    text that is not a plan."""
    data = parse(text)
    if isinstance(data, dict):
        data.pop("planned", None)
    return from_plain(Plan, data)
