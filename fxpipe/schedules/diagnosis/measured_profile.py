"""A profile corrected by a timeline: the ops of each stage are scaled so that they take what the stage took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.profile import OpCost, Profile
from fxpipe.ir.timeline import Timeline


def measured_profile(profile: Profile, plan: Plan, timeline: Timeline) -> Profile:
    """The profile, with the times of each stage of `plan` scaled to those in `timeline`, forward and backward by
    themselves. A stage took the median of its micro-batches; of replicas, the slowest one counts. Within a stage, ops
    keep their shares of the time, and their ratio between kinds of devices; if all of them were thought to take none,
    they get equal shares. Bytes stay."""
    forwards = _scaled(profile, plan, _took(timeline, "F"), lambda cost: cost.forward)
    backwards = _scaled(profile, plan, _took(timeline, "BIW"), lambda cost: cost.backward)
    ops = zip(profile.ops, forwards[""], backwards[""], strict=True)
    return Profile(
        profile.model,
        profile.batch,
        profile.device,
        "measured",
        tuple(replace(cost, forward=forward, backward=backward) for cost, forward, backward in ops),
        kinds=tuple(KindTimes(one.kind, forwards[one.kind], backwards[one.kind]) for one in profile.kinds),
    )


def _took(timeline: Timeline, kinds: str) -> dict[int, float]:
    """The seconds that each stage takes for the actions of these kinds of a micro-batch."""
    seconds: dict[tuple[int, str, int], float] = {}
    for device in timeline.devices:
        for span in timeline.on(device):
            if span.kind in kinds:
                ran = span.stage, device, span.micro_batch
                seconds[ran] = seconds.get(ran, 0.0) + span.seconds
    alike: dict[tuple[int, str], list[float]] = {}
    for (stage, device, _), one in seconds.items():
        alike.setdefault((stage, device), []).append(one)
    found: dict[int, float] = {}
    for (stage, _), times in alike.items():
        found[stage] = max(median(times), found.get(stage, 0.0))
    return found


def _scaled(
    profile: Profile, plan: Plan, took: Mapping[int, float], way: Callable[[OpCost], float]
) -> dict[str, tuple[float, ...]]:
    """The seconds of all ops one way on each kind of device, "" for that of the profile. `took` has those that each
    stage took, `way` picks those that an op was thought to take."""
    found = {kind: {name: way(cost) for name, cost in costs.items()} for kind, costs in profile.by_kind.items()}
    for index, stage in enumerate(plan.stages):
        seconds, replicas = took.get(index, 0.0), profile.replicas(stage.devices)
        thought = max(share * sum(way(costs[op]) for op in stage.ops) for costs, share in replicas)
        each = seconds / max(share for _, share in replicas) / len(stage.ops)
        for times in found.values():
            times.update((op, times[op] / thought * seconds if thought > 0 else each) for op in stage.ops)
    return {kind: tuple(times.values()) for kind, times in found.items()}
