"""The checked options for the arguments of `fxpipe.compile`; a plan that is given decides many of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import PlanError
from fxpipe.ir import dataclass_json
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan import plan_file
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.plan_file import PlanFile, StagePlace
from fxpipe.pipe.build.apply_strategy import (
    TensorParallelPlacement,
    place_of,
    shared_plan,
    strategy_devices,
    strategy_of,
    strategy_options,
)
from fxpipe.pipe.results.planned import Planned, cluster_in
from fxpipe.pipe.results.replanned import Replanned
from fxpipe.schedules.make_schedule import AUTO

from .check_options import check
from .compile_options import Options, Place, deal, device_labels, is_local, stage_devices
from .compile_table import COMPILE
from .option_conflicts import refuse_beside_plan, refuse_beside_strategy, refuse_optimizer_sharding
from .option_forms import Default


def read_options(asked: Mapping[str, Any], ranks: bool = False) -> Options:
    """The checked options for these arguments of `fxpipe.compile`; others have their defaults. `ranks`: whether each
    device is a rank."""
    given = {name: option.take(asked.get(name, option.default)) for name, option in COMPILE.items()}
    devices, chunks, replicas, schedule = (given[name] for name in ("devices", "chunks", "replicas", "schedule"))
    told = {name: value for name, value in given.items() if said(name, value)}
    strategy = place_of(given["plan"])
    shared = None if strategy else shared_plan(given["plan"])
    chosen, planned_for = (None, None) if strategy or shared else read_plan(given["plan"])
    place: Place | None = None
    cluster = devices if isinstance(devices, Cluster) else None
    if strategy is not None:
        place, count = strategy
        refuse_beside_strategy(told, strategy_of(place))
        labels = strategy_devices(devices, count)
        chunks, schedule, given["checkpoint"] = strategy_options(strategy_of(place), given, told)
        if "checkpoint" not in told and given["checkpoint"] == AUTO:
            given["checkpoint"] = "except_last"  # "auto" simulates stages of a pipeline; a strategy has none
        replica_groups = deal(labels, None)
    elif shared is not None:
        refuse_beside_plan(shared.plan, told)
        place, schedule, chunks = (
            TensorParallelPlacement(shared.plan, shared.shardings),
            shared.plan.schedule,
            shared.plan.chunks,
        )
        labels, given["checkpoint"] = _shared_devices(shared, devices), "never"  # each stage of the plan has its own
        refuse_optimizer_sharding(shared.plan, labels, ranks, told)
        cluster = cluster or (shared.cluster if devices is None else None)
        replica_groups = deal(labels, None)
    elif chosen is not None:
        before, chosen = chosen, runnable(chosen, devices)
        given["dynamic"] &= planned_for is None  # fxpipe.plan names the ops of one size
        stays = planned_for is not None and chosen == before and named(chosen).keys() <= set(planned_for.labels)
        cluster = cluster or (planned_for if stays else None)
        refuse_beside_plan(chosen, told)
        refuse_optimizer_sharding(chosen, named(chosen), ranks, told)
        labels, chunks, schedule = tuple(stage.device for stage in chosen.stages), chosen.chunks, chosen.schedule
        replica_groups = {stage.device: stage.replicas for stage in chosen.stages}
        given["deferred_batch_norm"] = chosen.deferred_batch_norm or given["deferred_batch_norm"]
    elif devices is None or chunks is None:
        lacks = (
            "" if devices is None and chunks is None else f"{'devices' if devices is None else 'chunks'} is missing: "
        )
        raise PlanError(f"{lacks}say how many, as in fxpipe.compile(model, devices=4, chunks=8)")
    else:
        labels = device_labels(devices)
        replica_groups = deal(labels, replicas)
        labels = labels if replicas is None else tuple(replica_groups)
        labels = stage_devices(labels, schedule, given["stages_per_device"])
    folder = given["dump"] or os.environ.get("FXPIPE_DUMP")
    as_they_are = (
        "warmup", "checkpoint", "cut", "profile", "batch_dim", "dynamic", "reduce", "deferred_batch_norm",
        "compile_stages", "transforms", "passes", "backward", "overlap_pairs", "memory_limit", "stages_per_device",
    )  # fmt: skip
    options = Options(
        devices=labels,
        chunks=chunks,
        schedule=schedule,
        offload=frozenset(given["offload"]),
        cluster=cluster,
        plan=chosen,
        dump=Path(folder) if folder else None,
        replicas=replica_groups,
        place=place,
        **{name: given[name] for name in as_they_are if given[name] is not None},
    )
    return check(options)


def said(name: str, value: Any) -> bool:
    """Whether the user has said something by the value of an option: a default does not contradict a plan."""
    default = COMPILE[name].default
    return not isinstance(value, Default) and not (isinstance(value, str) and value == default == AUTO)


def _shared_devices(
    shared: Planned, devices: int | str | Sequence[str | torch.device] | Cluster | None
) -> tuple[str, ...]:
    """The labels of all devices of a plan with tensor parallelism, stage by stage."""
    named = tuple(shared.cluster.labels[at] for stage in shared.layers.stages for at in stage.devices)
    if devices is None and not all(map(is_local, named)):
        raise PlanError(_elsewhere(named))
    labels = named if devices is None else device_labels(devices)
    if len(set(labels)) != len(named):
        raise PlanError(f"the plan is for {len(named)} devices ({', '.join(named)}), and devices names {len(labels)}")
    return labels


def _elsewhere(named: Sequence[str]) -> str:
    return (
        f"the plan is for {', '.join(named)}; say which devices of this machine stand for them, as in "
        f"devices={len(named)}"
    )


def read_plan(
    plan: Plan | Planned | Replanned | str | Path | None,
) -> tuple[Plan | PlanFile | None, Cluster | None]:
    """The plan itself, or the one in a file, and the cluster that it was made for, if that is known. Raises PlanError,
    with the place in the file, if it is not a plan."""
    if isinstance(plan, (str, Path)):
        try:
            text = Path(plan).read_text(encoding="utf-8")
            return plan_file.load(text), cluster_in(text)
        except (OSError, ValueError) as error:
            raise PlanError(f"no plan can be read from {str(plan)!r}: {error}") from None
    if isinstance(plan, Replanned):
        return plan_file.load(plan.text), None
    found, cluster = (plan.plan, plan.cluster) if isinstance(plan, Planned) else (plan, None)
    if found is None:
        return None, None
    try:
        dataclass_json.check(found)
    except ValueError as error:
        raise PlanError(f"plan cannot be used: {error}") from None
    return found, cluster


def runnable(
    plan: Plan | PlanFile, devices: int | str | Sequence[str | torch.device] | Cluster | None
) -> Plan | PlanFile:
    """The plan on devices of this machine. Raises PlanError if it cannot run."""
    replica_groups: dict[str, tuple[str, ...]] = {}
    stages: tuple[StagePlan | StagePlace, ...] = plan.stages
    for index, stage in enumerate(stages):
        own = stage.devices
        if len(set(own)) < len(own) or any(replica_groups.setdefault(label, own) != own for label in own):
            raise PlanError(
                f"stage {index} of the plan is on {', '.join(own)}: stages that share a device share all of "
                "theirs, each named once"
            )
        if isinstance(stage, StagePlan) and not stage.ops:
            raise PlanError(
                f"stage {index} of the plan has no ops: it was made for a chain of layers; plan the model itself, as "
                "in fxpipe.plan(model, cluster, batch_size, example_inputs=(x,))"
            )
    names = named(plan)
    if devices is None:
        if not all(map(is_local, names)):
            raise PlanError(_elsewhere(tuple(names)))
        return plan
    labels = device_labels(devices)
    if isinstance(devices, Cluster) and names.keys() <= set(labels):
        return plan
    if len(labels) != len(names):
        raise PlanError(f"the plan is for {len(names)} devices ({', '.join(names)}), and devices names {len(labels)}")
    stands_for = dict(zip(names, labels, strict=True))
    renamed: Any = tuple(
        replace(stage, device=stands_for[stage.device], replicas=tuple(stands_for[label] for label in stage.replicas))
        for stage in stages
    )
    return replace(plan, stages=renamed)


def named(plan: Plan | PlanFile) -> dict[str, None]:
    """The labels of the plan's devices, in the order of their first stages."""
    stages: tuple[StagePlan | StagePlace, ...] = plan.stages
    return dict.fromkeys(label for stage in stages for label in stage.devices)
