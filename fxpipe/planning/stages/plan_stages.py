"""Graph, profile and cluster -> Plan: which ops form which stage, by time or by memory, or as the user says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph, is_opaque
from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.ir.plan.plan import CHECKPOINT_MODES, Plan, StagePlan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.plan.profile import check as check_profile
from fxpipe.ir.units import show_bytes

from .balance import Cuts, StageCosts
from .balance import balance as best_balance
from .cut_costs import PARAMETER_COPIES, memory_costs, stage_costs, traffic
from .manual_cuts import cuts_by_hand
from .op_order import arrange
from .sample_cuts import replica_cuts
from .snap_cuts import settle, ugliness

GOALS = ("time", "memory")


def plan(
    graph: Graph,
    profile: Profile,
    cluster: Cluster,
    *,
    devices: Sequence[str] | None = None,
    chunks: int = 1,
    checkpoint: str | Collection[int] | Sequence[str] = "except_last",
    cut: str | Sequence[int] | Sequence[str] = "time",
    schedule: str = "gpipe",
    deferred_batch_norm: bool = False,
    parameter_copies: int = PARAMETER_COPIES,
    slack: float = 0.02,
    replicas: Mapping[str, tuple[str, ...]] | None = None,
    uncut: Collection[str] = (),
) -> Plan:
    """The plan for one stage on each of `devices`, in this order (by default all devices of the cluster). The profile
    is that of one micro-batch, with the times on each kind of device (devices of which it has none are like its own);
    it may be of any kind if the user chooses the cuts. Raises PlanError if there is no plan.

    - `chunks`: the number of micro-batches.
    - `checkpoint`: a mode for all stages, or one for each, or the stages that recompute ("except_last").
    - `cut`: "time" (the slowest stage is as fast as possible, within memory), "memory" (the fullest stage is as
      empty as possible), how many blocks each stage gets, as in `[5, 3, 7]`, or the modules before whose first op to
      cut, as in `["encoder.3", ...]`. `fxpipe.ir.graph.module_blocks` says what a block is: a child of an
      `nn.Sequential`, or a layer such as `encoder.layers.3`.
    - `slack`: by time, the slowest stage may be slower than the least possible by this share, if cuts then lie where
      less crosses or where modules end; 0 is the exact optimum.
    - `replicas`: by the first device of a stage its further devices.
    - `uncut`: values that cannot be cut between samples, so cannot go between stages of different numbers of replicas.
    """
    labels = tuple(cluster.labels if devices is None else devices)
    modes = _checkpoints(checkpoint, len(labels))
    further = [(replicas or {}).get(label, ()) for label in labels]
    check_request(graph, profile, cluster, labels, chunks)
    if not isinstance(cut, str):
        ordered, cuts = graph, cuts_by_hand(graph, cut, len(labels))
    elif cut in GOALS:
        ordered = arrange(graph, {cost.name: cost for cost in profile.ops})
        shares = [1 + len(others) for others in further]
        costs = stage_costs(ordered, profile, cluster, labels, modes, chunks, parameter_copies, further)
        legal = inner_cuts(ordered)
        allowed: Sequence[Sequence[int]] = replica_cuts(ordered, legal, shares, uncut)
        cuts, allowed = _best_cuts(ordered, costs, labels, cut, legal, allowed)
        if cut == "time" and slack:
            cuts = _settled(ordered, profile, costs, cuts, allowed, slack)
    else:
        raise PlanError(f"cut is {cut!r}: write one of {GOALS}, or a list of numbers of blocks or names of modules")
    made = stages(graph, ordered, cuts, labels, modes)
    made = tuple(replace(stage, replicas=others) for stage, others in zip(made, further, strict=True))
    return Plan(graph.model, made, chunks, schedule, deferred_batch_norm)


def check_request(graph: Graph, profile: Profile, cluster: Cluster, labels: Sequence[str], chunks: int) -> None:
    """Raise PlanError for a request for which there is no plan, such as one without devices."""
    if chunks < 1:
        raise PlanError(f"chunks is {chunks}; a plan needs at least one micro-batch")
    if not labels:
        raise PlanError("devices is empty; a plan needs at least one device")
    unknown = [label for label in labels if label not in cluster.labels]
    if unknown:
        raise PlanError(f"there is no device {unknown[0]!r} in the cluster; it has {', '.join(cluster.labels)}")
    check_profiled(graph, profile)


def check_profiled(graph: Graph, profile: Profile) -> None:
    """Raise PlanError if there is nothing to plan, or the profile is not one of the graph."""
    if not graph.ops:
        raise PlanError(f"{graph.model} has no ops: there is nothing to plan; call the model itself")
    try:
        check_profile(profile, [op.name for op in graph.ops])
    except ValueError as error:
        raise PlanError(str(error)) from None


def _checkpoints(checkpoint: str | Collection[int] | Sequence[str], k: int) -> tuple[str, ...]:
    """The mode of each of k stages."""
    if isinstance(checkpoint, str):
        checkpoint = (checkpoint,) * k
    modes = tuple(mode for mode in checkpoint if isinstance(mode, str))
    if modes:
        unknown = [mode for mode in modes if mode not in CHECKPOINT_MODES]
        if unknown:
            raise PlanError(f"checkpoint is {unknown[0]!r}: write one of {CHECKPOINT_MODES}, or a set of stages")
        if len(modes) != k:
            raise PlanError(f"checkpoint has {len(modes)} modes, and there are {k} stages")
        return modes
    stages = {stage for stage in checkpoint if isinstance(stage, int)}
    wrong = sorted(stages - set(range(k)))
    if wrong:
        raise PlanError(f"checkpoint names stage {wrong[0]}, but the stages are 0 to {k - 1}")
    return tuple("except_last" if s in stages else "never" for s in range(k))


def stages(
    graph: Graph, ordered: Graph, cuts: Cuts, labels: Sequence[str], modes: Sequence[str]
) -> tuple[StagePlan, ...]:
    """The stages between neighbouring cuts of `ordered`. Within a stage ops run in the order of `graph`, as captured:
    it reads better, and gradients add up in the same order as in the model."""
    captured = {op.name: position for position, op in enumerate(graph.ops)}
    names = [op.name for op in ordered.ops]
    spans = zip(pairwise(cuts), labels, modes, strict=True)
    return tuple(
        StagePlan(tuple(sorted(names[i:j], key=captured.__getitem__)), label, mode) for (i, j), label, mode in spans
    )


def _best_cuts(
    graph: Graph,
    costs: list[StageCosts],
    labels: Sequence[str],
    goal: str,
    legal: Sequence[int],
    allowed: Sequence[Sequence[int]],
) -> tuple[Cuts, Sequence[Sequence[int]]]:
    """The exact balance over the allowed cuts, or, if there is none, over all legal ones; and these positions."""
    if len(labels) > len(legal) + 1:
        raise _too_many(graph, len(labels), legal)
    load = memory_costs(costs) if goal == "memory" else costs
    anywhere = [legal] * (len(labels) - 1)
    cuts = best_balance(load, allowed)
    if cuts is None and allowed != anywhere:
        allowed, cuts = anywhere, best_balance(load, anywhere)
    if cuts is None:
        raise _too_big(costs, anywhere, labels)
    return cuts, allowed


def _settled(
    graph: Graph,
    profile: Profile,
    costs: list[StageCosts],
    cuts: Cuts,
    allowed: Sequence[Sequence[int]],
    slack: float,
) -> Cuts:
    """The cuts, moved within `slack` to better places in the user's code."""
    across = traffic(graph, {cost.name: cost for cost in profile.ops})
    crossing = [a + b for a, b in zip(across.values, across.gradients, strict=True)]
    return settle(costs, allowed, cuts, ugliness(graph, crossing), slack)


def inner_cuts(graph: Graph) -> list[int]:
    """The positions of legal cuts that leave ops on both sides."""
    return [p for p, legal in enumerate(legal_cuts(graph)) if legal and 0 < p < len(graph.ops)]


def _too_many(graph: Graph, k: int, legal: Sequence[int]) -> PlanError:
    most = len(legal) + 1
    why = f"it has {len(graph.ops)} ops" + ("" if most == len(graph.ops) else ", and some must stay together")
    whole: dict[Any, None] = dict.fromkeys(op.target for op in graph.ops if is_opaque(op))
    kept = "".join(f"; {piece} is kept whole, {piece.because}" for piece in whole)
    return PlanError(
        f"{graph.model} cannot be cut into {k} stages: {why}{kept}. Ask for at most {most}: devices={most}"
        + (", or move what cannot be traced into the forward of smaller submodules" if kept else "")
    )


def _too_big(costs: list[StageCosts], allowed: Sequence[Sequence[int]], labels: Sequence[str]) -> PlanError:
    """The error for a model that does not fit: the stage that lacks most memory, in the plan where that is least."""
    n = len(costs[0].work)
    endless = max(stage.bytes[-1] + max(stage.hold) for stage in costs)
    lacking = [
        StageCosts(stage.bytes, stage.hold, [-stage.room] * n, stage.bytes, stage.hold, endless) for stage in costs
    ]
    cuts = best_balance(lacking, allowed)
    if cuts is None:
        raise AssertionError("legal cuts exist, and memory does not bind")
    lacks = [stage.load(i, j) for stage, (i, j) in zip(lacking, pairwise(cuts), strict=True)]
    s = max(range(len(lacks)), key=lambda s: lacks[s])
    held, room = lacks[s] + costs[s].room, costs[s].room
    return PlanError(
        f"the model does not fit: even at the best cuts stage {s} on {labels[s]} needs {show_bytes(held)} of memory "
        f"and has {show_bytes(room)}, {show_bytes(lacks[s])} too little. Use more devices, a smaller batch, "
        f"checkpoint='always', or an optimizer that keeps less for each parameter (parameter_copies)"
    )
