"""The `plan` of `fxpipe.compile` where it is a strategy: its forms, and how it assigns a device to every op of a graph;
and a plan with tensor parallelism, which does the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import PlanError
from fxpipe.ir import dataclass_json
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph, Op, Ref, map_refs, target_name
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
from fxpipe.pipe.results.replanned import Replanned
from fxpipe.pipe.results.searched import Searched, load
from fxpipe.planning.operators.fit_strategy import fit
from fxpipe.planning.operators.reading.read_operators import read
from fxpipe.planning.stages.loss_placement import with_loss
from fxpipe.planning.stages.parameter_placement import homes, stages_like

RequestedPlan = Plan | Planned | Replanned | Searched | tuple[OperatorGraph, Strategy] | str | Path | Place


@dataclass(frozen=True)
class StrategyPlacement:
    """Cuts the ops of a graph and places them on `devices` devices, as the `strategy` for `operators` says.

    - `first`: the graph of the first kind of call; later kinds may have other operators, cut like their first input.
    """

    operators: OperatorGraph
    strategy: Strategy
    devices: int
    first: Graph | None = None

    def __call__(self, graph: Graph, sizes: Mapping[str, int]) -> Placed:
        """Raises PlanError if the strategy does not fit this graph, or an op cannot be cut."""
        reading = read(graph, sizes)
        try:
            fitted = fit(self.operators, self.strategy, reading.operators, self.devices, self.first is not None)
        except ValueError as error:
            raise PlanError(str(error)) from None
        placed = shard(graph, reading, fitted, sizes)
        return replace(placed, cuts=tuple(zip(reading.operators, fitted.configs, strict=True)))


@dataclass(frozen=True)
class TensorParallelPlacement:
    """Cuts the ops of a graph over the groups of a plan's stages.

    - `whole_sums`: as for `share`.
    - `first`: the graph of the first kind of call; later kinds may have other ops, which run where their tensors are.
    """

    plan: Plan
    shardings: tuple[OpSharding, ...]
    whole_sums: bool = False
    first: Graph | None = None

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """For each device the mode of its stage."""
        return tuple(
            stage.checkpoint for stage in self.plan.stages for _ in range(len(stage.devices) * stage.tensor_parallel)
        )

    def __call__(self, graph: Graph, sizes: Mapping[str, int]) -> Placed:
        """Raises PlanError if the plan does not fit this graph, or an op cannot be cut."""
        shardings = {one.op: one for one in self.shardings}
        try:
            stages = stage_of(self._fitted(graph))
        except ValueError as error:
            if self.first is None:
                raise PlanError(str(error)) from None
            stages = stages_like(graph, homes(self.first, self._fitted(self.first)))
        if self.first is not None and not same_ops(graph, self.first):
            shardings = shardings_like(graph, self.first, shardings)
        groups = [(len(stage.devices), stage.tensor_parallel) for stage in self.plan.stages]
        return share(graph, sizes, stages, groups, shardings, self.whole_sums)

    def _fitted(self, graph: Graph) -> Plan:
        """The plan for the ops of this graph. Raises ValueError if it is one for another graph."""
        plan = self.plan if graph.training else without_others(self.plan, graph)
        fitted = with_loss(graph, plan)
        alone = tuple(replace(stage, tensor_parallel=1) for stage in fitted.stages)
        check_plan(replace(fitted, stages=alone), [op.name for op in graph.ops])
        return fitted


def with_first_graph(place: Place, first: Graph | None) -> Place:
    """What places the ops of a kind of call; `first`: the graph of the first kind, None for that one."""
    return replace(place, first=first) if isinstance(place, (StrategyPlacement, TensorParallelPlacement)) else place


def same_ops(graph: Graph, first: Graph) -> bool:
    """Whether ops with the same name compute the same with the same tensors of the model, but for their sizes."""
    here, there = ({op.name: (op.target, paths) for op, paths in with_paths(one)} for one in (graph, first))
    return all(there.get(name, what) == what for name, what in here.items())


def shardings_like(graph: Graph, first: Graph, known: Mapping[str, OpSharding]) -> dict[str, OpSharding]:
    """How the ops of a further kind of call are cut: as those of the first kind with the same arguments and tensors of
    the model, or those without such tensors that have the same name, if results are as large. `known`: the shardings
    of the first kind."""
    named = {op.name: op for op in first.ops}
    weighted = {(op.target, paths): op for op, paths in with_paths(first) if paths}
    found: dict[str, OpSharding] = {}
    for op, paths in with_paths(graph):
        like = weighted.get((op.target, paths)) if paths else named.get(op.name)
        if like is not None and like.name in known and _what(like) == _what(op):
            found[op.name] = replace(known[like.name], op=op.name)
    return found


def with_paths(graph: Graph) -> Iterator[tuple[Op, tuple[str, ...]]]:
    """The ops, each with the paths of the tensors of the model that it reads."""
    paths = {state.name: state.path for state in graph.states}
    for op in graph.ops:
        yield op, tuple(paths[name] for name in op.reads if name in paths)


def _what(op: Op) -> tuple[str, ...]:
    """What an op calls, with which arguments, whatever their names are, and what it returns."""
    return target_name(op.target), str(map_refs((op.args, op.kwargs), lambda _: Ref(""))), str(op.type)


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
    return place.strategy if isinstance(place, StrategyPlacement) else None


def strategy_options(
    strategy: Strategy | None, given: Mapping[str, Any], told: Mapping[str, Any]
) -> tuple[int, Any, Any]:
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


def place_of(asked: RequestedPlan | None) -> tuple[Place, int | None] | None:
    """A function that places ops, a `StrategyPlacement` for a strategy, and the number of devices it uses; None for the
    caller's own function. Returns None for a plan of stages. Raises PlanError for a strategy that is not valid."""
    if isinstance(asked, (str, Path)):
        asked = _strategy_in(asked)
    if isinstance(asked, Searched):
        return StrategyPlacement(asked.graph, asked.strategy, len(asked.cluster.devices)), len(asked.cluster.devices)
    if isinstance(asked, tuple):
        graph, strategy = asked
        devices = 1 + max(device for config in strategy.configs for device in config.devices)
        try:
            check(graph, strategy, devices)
        except ValueError as error:
            raise PlanError(str(error)) from None
        return StrategyPlacement(graph, strategy, devices), devices
    return (asked, None) if callable(asked) else None


def _strategy_in(path: str | Path) -> Searched | None:
    """The strategy in a file; None for another file: the reader of plans says what is wrong with it."""
    try:
        found = dataclass_json.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return load(path) if isinstance(found, dict) and "strategy" in found else None
