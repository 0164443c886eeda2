"""The times of a profile on other kinds of devices than its own, by the roofline model.

What an op takes on a device that it was not profiled on is its time, times the ratio of its estimates for the two. So
products follow the speed for their element type, other ops mostly that of the memory, and what a measurement knows
better than an estimate stays. Of an estimated profile the result is the estimate for the other device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.cluster.device_kinds import other_kinds
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.ir.plan.profile import Profile

from .estimate import estimate


def on_kinds(
    graph: Graph, sizes: Mapping[str, int], profile: Profile, cluster: Cluster, first: str, products: str | None = None
) -> Profile:
    """The profile with times for each kind of device in `cluster`. Kinds that it has times for stay as they are.

    - `sizes`: the numbers of symbolic sizes that the profile is for.
    - `first`: the label of the device that the profile is taken to be for if `cluster` has no device of its label.
    - `products`: the element type in which matrices are multiplied, as for `estimate`.
    """
    known = cluster.device(profile.device if profile.device in cluster.labels else first)
    kinds = {kind: one for kind, one in other_kinds(cluster, known).items() if not profile.kind_of(one.label)}
    if not kinds:
        return profile
    here = estimate(graph, sizes, known, products)

    def times(kind: str, device: Device) -> KindTimes:
        there = estimate(graph, sizes, device, products)
        both = list(zip(profile.ops, here.ops, there.ops, strict=True))
        forwards = tuple(_scaled(cost.forward, a.forward, b.forward) for cost, a, b in both)
        backwards = tuple(_scaled(cost.backward, a.backward, b.backward) for cost, a, b in both)
        return KindTimes(kind, forwards, backwards)

    return replace(profile, kinds=(*profile.kinds, *(times(kind, device) for kind, device in kinds.items())))


def _scaled(seconds: float, here: float, there: float) -> float:
    """Seconds on the other device; what is thought to take no time on either, such as a view, takes as long there."""
    return seconds * (there / here) if here else seconds
