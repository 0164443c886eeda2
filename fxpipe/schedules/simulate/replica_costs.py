"""Replicas of a stage. They run in lock-step, so one is simulated, and all get its row. Gradients of all replicas are
added up on the first one at the end of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.network import split_concat
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.profile import Profile, total
from fxpipe.ir.timeline import Timeline

from .simulate import Reduction


def reductions(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[Reduction, ...]:
    """A reduction for each stage that has replicas: their gradients go to the first one."""
    at = {cost.name: cost for cost in profile.ops}
    found = []
    for index, stage in enumerate(plan.stages):
        if stage.replicas:
            count = total([at[op] for op in stage.ops]).parameters * len(stage.replicas)
            others, first = positions(cluster, stage.replicas), positions(cluster, (stage.device,))
            found.append(Reduction(index, split_concat(cluster, others, first).seconds(count)))
    return tuple(found)


def positions(cluster: Cluster, labels: Sequence[str]) -> list[int]:
    """The positions of the devices in the cluster."""
    return [cluster.labels.index(label) for label in labels]


def spread(timeline: Timeline, replica_groups: Mapping[str, Sequence[str]]) -> Timeline:
    """The timeline with a row for each replica; `replica_groups` has by the first replica the labels of all."""
    rows = {device: tuple(replica_groups.get(device, (device,))) for device in timeline.devices}
    spans = (replace(span, where=where) for span in timeline.spans for where in rows.get(span.where, (span.where,)))
    memory = (steps for device, steps in zip(timeline.devices, timeline.memory, strict=True) for _ in rows[device])
    devices = tuple(label for replica_group in rows.values() for label in replica_group)
    return replace(timeline, devices=devices, spans=tuple(spans), memory=tuple(memory))
