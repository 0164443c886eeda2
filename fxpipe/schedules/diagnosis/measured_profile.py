"""A profile corrected by a timeline: the ops of each stage are scaled so that they take what the stage took."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from fxpipe.ir.cluster.cluster import Cluster, slowness
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.profile import OpCost, Profile, total
from fxpipe.ir.replica_shares import largest_share
from fxpipe.ir.timeline import Timeline

FORWARD, BACKWARD = "F", "BIW"


def measured_profile(profile: Profile, plan: Plan, cluster: Cluster, timeline: Timeline) -> Profile:
    """The profile, with the times of each stage of `plan` scaled to those in `timeline`, forward and backward by
    themselves. A stage took the median of its micro-batches; of replicas, the slowest one counts. Within a stage, ops
    keep their shares of the time; if all of them were thought to take none, they get equal shares. Bytes stay."""
    took: dict[tuple[int, str], float] = {}
    for kinds in (FORWARD, BACKWARD):
        took |= {(stage, kinds): seconds for stage, seconds in _took(timeline, kinds).items()}
    costs = {cost.name: cost for cost in profile.ops}
    for index, stage in enumerate(plan.stages):
        own = [costs[op] for op in stage.ops]
        share = largest_share(profile.batch, len(stage.devices)) * slowness(cluster, stage.device, profile.device)
        forward, backward = (took.get((index, kinds), 0.0) / share for kinds in (FORWARD, BACKWARD))
        costs |= {cost.name: cost for cost in _scaled(own, forward, backward)}
    ops = tuple(costs[cost.name] for cost in profile.ops)
    return Profile(profile.model, profile.batch, profile.device, "measured", ops)


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


def _scaled(costs: list[OpCost], forward: float, backward: float) -> list[OpCost]:
    """The ops of a stage, which takes these times in all."""
    own = total(costs)

    def part(cost: float, of: float, seconds: float) -> float:
        return cost / of * seconds if of > 0 else seconds / len(costs)

    return [
        replace(
            cost,
            forward=part(cost.forward, own.forward, forward),
            backward=part(cost.backward, own.backward, backward),
        )
        for cost in costs
    ]
