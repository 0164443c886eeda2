"""Tensor parallelism for `fxpipe.plan`: which sizes are tried, and what a model costs on a group of devices.

ModelProfile ─op_cuts─▶ ways to cut each op ─fastest─▶ GroupCosts ─costed─▶ Chain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_groups import grouped, groups, most_in_a_group, slowest_ring
from fxpipe.ir.operators.group_layout import OpSharding
from fxpipe.ir.plan.layer_chain import Chain, nearest_at
from fxpipe.passes.sharding.op_cuts import op_cuts
from fxpipe.planning.hybrid.group_layers import Layers, costed
from fxpipe.planning.tensor_parallel.group_costs import Group, fastest

from .profile import ModelProfile


@dataclass(frozen=True)
class Candidate:
    """What a planner needs for groups of `degree` devices.

    - `cluster`: the cluster of groups.
    - `chains`, `shardings`: for each size of micro-batch the costs of layers, and how each op is cut.
    """

    degree: int
    cluster: Cluster
    chains: tuple[Chain, ...]
    shardings: tuple[tuple[OpSharding, ...], ...]

    def shardings_at(self, batch: float) -> tuple[OpSharding, ...]:
        """How ops are cut in micro-batches of `batch` samples."""
        return self.shardings[nearest_at(self.chains, batch)]


def degrees_of(asked: int | str | Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """The tensor-parallel sizes to try, ascending: for "auto" the powers of two up to the devices of a server."""
    if isinstance(asked, str):
        return tuple(2**power for power in range(most_in_a_group(cluster).bit_length()))
    return (asked,) if isinstance(asked, int) else tuple(sorted(set(asked)))


def candidate(profiles: Sequence[ModelProfile], made: Layers, cluster: Cluster, degree: int) -> Candidate:
    """The candidate for groups of `degree` devices. `profiles` are for one device, at each size of micro-batch. Raises
    PlanError if the cluster has no such groups."""
    try:
        places = grouped(cluster, degree)
        group = Group(degree, slowest_ring(cluster, groups(cluster, degree)))
        found = []
        for known in profiles:
            cuts = op_cuts(known.graph, known.sizes, degree)
            found.append(fastest(known.graph, known.sizes, known.ops, cuts, group))
    except ValueError as error:
        raise PlanError(f"tensor_parallel={degree}: {error}") from None
    own = [replace(known, ops=one.ops, kinds=()) for known, one in zip(profiles, found, strict=True)]
    chains = tuple(costed(known.graph, known, made) for known in own)
    return Candidate(degree, places, chains, tuple(one.shardings for one in found))
