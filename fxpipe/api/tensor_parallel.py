"""Tensor parallelism for `fxpipe.plan`: which sizes are tried, and what a model costs on a group of devices.

ModelProfile ─op_cuts─▶ ways to cut each op ─fastest─▶ GroupCosts ─costed─▶ Chain
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_groups import grouped, groups, most_in_a_group, slowest_ring
from fxpipe.ir.operators.group_layout import OpSharding
from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.ir.plan.layer_chain import Chain, nearest_at
from fxpipe.ir.plan.stage_ways import Way
from fxpipe.passes.sharding.op_cuts import op_cuts
from fxpipe.pipe.results.plan_alternatives import TriedSize
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

    @property
    def way(self) -> Way:
        return Way(self.degree, self.chains)

    def shardings_at(self, batch: float) -> tuple[OpSharding, ...]:
        """How ops are cut in micro-batches of `batch` samples; nothing for single devices."""
        return self.shardings[nearest_at(self.chains, batch)] if self.shardings else ()


def shardings_of(made: Layers, plan: HybridPlan, found: Sequence[Candidate], batch: float) -> tuple[OpSharding, ...]:
    """How the ops of a plan are cut in micro-batches of `batch` samples, stage by stage. The way of a stage is a
    position in `found`."""
    known = [{one.op: one for one in each.shardings_at(batch)} for each in found]
    named = ((stage, op) for stage in plan.stages for layer in made.ops[stage.first : stage.end] for op in layer)
    return tuple(known[stage.way][op] for stage, op in named if op in known[stage.way])


def degrees_of(asked: int | str | Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """The tensor-parallel sizes to try, ascending: for "auto" the powers of two up to the devices of a server."""
    if isinstance(asked, str):
        return tuple(2**power for power in range(most_in_a_group(cluster).bit_length()))
    return (asked,) if isinstance(asked, int) else tuple(sorted(set(asked)))


def candidates_of(
    profiles: Sequence[ModelProfile],
    made: Layers,
    cluster: Cluster,
    degrees: Sequence[int],
    alone: Callable[[], tuple[Chain, ...]],
) -> tuple[list[Candidate], list[TriedSize]]:
    """The candidates of these sizes, and the sizes for which the cluster has no groups. `alone` gives what layers cost
    on single devices. Raises PlanError if no size is left."""
    found, refused = list[Candidate](), list[TriedSize]()
    for degree in degrees:
        try:
            if degree == 1:
                found.append(Candidate(1, cluster, alone(), ()))
            else:
                found.append(candidate(profiles, made, cluster, degree))
        except PlanError as error:
            refused.append(TriedSize(degree, refusal=str(error)))
    if not found:
        raise PlanError(refused[-1].refusal)
    return found, refused


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
