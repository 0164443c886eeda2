"""The `strategy` of `fxpipe.compile`: its forms, and how it assigns a device to every op of a graph; and a plan with
tensor parallelism, which does the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.group_layout import OpSharding
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Strategy, check
from fxpipe.ir.plan import plan as plans
from fxpipe.ir.plan.plan import Plan, stage_of
from fxpipe.ir.plan.plan import check as check_plan
from fxpipe.passes.sharding import shard
from fxpipe.passes.sharding.share_ops import share
from fxpipe.pipe.options.compile_options import Place, device_labels
from fxpipe.pipe.results.planned import Planned
from fxpipe.pipe.results.planned import load as load_planned
from fxpipe.pipe.results.searched import Searched, load
from fxpipe.planning.operators.fit_strategy import fit
from fxpipe.planning.operators.reading.read_operators import read
from fxpipe.planning.stages.loss_placement import with_loss

RequestedCall = Searched | tuple[OperatorGraph, Strategy] | str | Path | Place


@dataclass(frozen=True)
class Sharding:
    """Cuts the ops of a graph and places them on `devices` devices, as the `strategy` for `operators` says."""

    operators: OperatorGraph
    strategy: Strategy
    devices: int

    def __call__(self, graph: Graph, sizes: Mapping[str, int]) -> Placed:
        """Raises PlanError if the strategy does not fit this graph, or an op cannot be cut."""
        reading = read(graph, sizes)
        try:
            fitted = fit(self.operators, self.strategy, reading.operators, self.devices)
        except ValueError as error:
            raise PlanError(str(error)) from None
        placed = shard(graph, reading, fitted, sizes)
        return replace(placed, cuts=tuple(zip(reading.operators, fitted.configs, strict=True)))


@dataclass(frozen=True)
class Sharing:
    """Cuts the ops of a graph over the groups of a plan's stages. `whole_sums`: as for `share`."""

    plan: Plan
    shardings: tuple[OpSharding, ...]
    whole_sums: bool = False

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """For each device the mode of its stage."""
        return tuple(
            stage.checkpoint for stage in self.plan.stages for _ in range(len(stage.devices) * stage.tensor_parallel)
        )

    def __call__(self, graph: Graph, sizes: Mapping[str, int]) -> Placed:
        """Raises PlanError if the plan does not fit this graph, or an op cannot be cut."""
        try:
            plan = self.plan if graph.training else without_others(self.plan, graph)
            fitted = with_loss(graph, plan)
            alone = tuple(replace(stage, tensor_parallel=1) for stage in fitted.stages)
            check_plan(replace(fitted, stages=alone), [op.name for op in graph.ops])
        except ValueError as error:
            raise PlanError(str(error)) from None
        groups = [(len(stage.devices), stage.tensor_parallel) for stage in fitted.stages]
        shardings = {one.op: one for one in self.shardings}
        return share(graph, sizes, stage_of(fitted), groups, shardings, self.whole_sums)


def without_others(plan: Plan, graph: Graph) -> Plan:
    """The plan without ops that the graph does not have: in evaluation, a norm counts no batches."""
    names = {op.name for op in graph.ops}
    stages = (replace(stage, ops=tuple(op for op in stage.ops if op in names)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def shared_plan(asked: object) -> Planned | None:
    """What `fxpipe.plan` returned, or the file that it was saved in, if it has tensor parallelism; else None."""
    if isinstance(asked, (str, Path)):
        try:
            text = Path(asked).read_text(encoding="utf-8")
            shared = shares_ops(plans.load(text)) if '"tensor_parallel"' in text else False
        except (OSError, ValueError):
            return None  # the reader of plans says what is wrong
        return load_planned(asked) if shared else None
    return asked if isinstance(asked, Planned) and shares_ops(asked.plan) else None


def shares_ops(plan: Plan) -> bool:
    """Whether ops of some stage are cut."""
    return any(stage.tensor_parallel > 1 for stage in plan.stages)


def strategy_of(place: Place | None) -> Strategy | None:
    """The strategy by which a function places ops; None for a caller's own function."""
    return place.strategy if isinstance(place, Sharding) else None


def way_of(strategy: Strategy | None, given: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[int, Any, Any]:
    """The options chunks, schedule and checkpoint with this strategy, for all that are `given`, and those of them that
    the user has `told`. Several micro-batches run one after the other, and a strategy says what is recomputed."""
    micro_batches = strategy.micro_batches if strategy else 1
    says = strategy is not None and (micro_batches > 1 or bool(strategy.recomputed))
    schedule = "1f1b" if micro_batches > 1 and "schedule" not in told else given["schedule"]
    checkpoint = "never" if says and "checkpoint" not in told else given["checkpoint"]
    return given["chunks"] or micro_batches, schedule, checkpoint


def strategy_devices(
    devices: int | str | Sequence[str | torch.device] | Cluster | None, count: int | None
) -> tuple[str, ...]:
    """The labels of at least `count` different devices, for the devices that a strategy numbers."""
    asked = count if devices is None else devices
    if asked is None:
        raise PlanError("say on which devices the function places ops, as in devices=4")
    labels = device_labels(asked)
    if len(labels) < (count or 0):
        raise PlanError(f"the strategy is for {count} devices, and devices names {len(labels)}")
    if len(set(labels)) < len(labels):
        raise PlanError(f"a strategy has a number for each device; name each of {', '.join(labels)} once")
    return labels


def place_of(asked: RequestedCall) -> tuple[Place, int | None]:
    """A function that places ops, a `Sharding` for a strategy, and the number of devices it uses; None for the caller's
    own function. Raises PlanError if `asked` is not a valid strategy."""
    if isinstance(asked, (str, Path)):
        asked = load(asked)
    if isinstance(asked, Searched):
        return Sharding(asked.graph, asked.strategy, len(asked.cluster.devices)), len(asked.cluster.devices)
    if isinstance(asked, tuple):
        graph, strategy = asked
        devices = 1 + max(device for config in strategy.configs for device in config.devices)
        try:
            check(graph, strategy, devices)
        except ValueError as error:
            raise PlanError(str(error)) from None
        return Sharding(graph, strategy, devices), devices
    if callable(asked):
        return asked, None
    raise PlanError(
        f"strategy is a {type(asked).__name__}: give what fxpipe.search found, the path of its JSON file, or a pair of "
        "an OperatorGraph and its Strategy"
    )
