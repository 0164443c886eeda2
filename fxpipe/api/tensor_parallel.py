"""Tensor parallelism for `fxpipe.plan`: which sizes are tried, and what a model costs on a group of devices.

ModelProfile ─op_cuts─▶ ways to cut each op ─fastest, frontier─▶ GroupCosts ─costed─▶ Chain
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from math import ceil

import numpy as np

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_groups import grouped, groups, most_in_a_group, slowest_ring
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.group_layout import OpSharding
from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.ir.plan.layer_chain import Chain, nearest_at
from fxpipe.ir.plan.stage_ways import Way
from fxpipe.passes.sharding.op_cuts import op_cuts
from fxpipe.pipe.results.plan_alternatives import TriedSize
from fxpipe.planning.hybrid.group_layers import Layers, costed
from fxpipe.planning.tensor_parallel.cut_frontier import Counted, CutSpace, GroupCosts, cut_space, frontier
from fxpipe.planning.tensor_parallel.group_costs import Group
from fxpipe.planning.tensor_parallel.group_traffic import group_traffic

from .profile import ModelProfile

SAME = 1e-12  # costs that differ by this share are equal: sums have rounding errors


@dataclass(frozen=True)
class Candidate:
    """What a planner needs for groups of `degree` devices, with one way to cut every op.

    - `cluster`: the cluster of groups.
    - `chains`, `found`: for each size of micro-batch the costs of layers, and how each op is cut.
    - `spaces`: for each size of micro-batch all ways to cut ops.
    """

    degree: int
    cluster: Cluster
    chains: tuple[Chain, ...]
    found: tuple[GroupCosts, ...]
    spaces: tuple[CutSpace, ...] = field(default=(), repr=False)

    @property
    def way(self) -> Way:
        return Way(self.degree, self.chains)

    def at(self, batch: float) -> GroupCosts:
        """How ops are cut in micro-batches of `batch` samples; not at all on single devices."""
        return self.found[nearest_at(self.chains, batch)] if self.found else GroupCosts((), (), {})

    @cached_property
    def figures(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """All costs of all layers, in one row."""
        return np.array([astuple(layer)[1:] for chain in self.chains for layer in chain.layers]).ravel()


def shardings_of(made: Layers, plan: HybridPlan, found: Sequence[Candidate], batch: float) -> tuple[OpSharding, ...]:
    """How the ops of a plan are cut in micro-batches of `batch` samples, stage by stage. The way of a stage is a
    position in `found`."""
    known = [{one.op: one for one in each.at(batch).shardings} for each in found]
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
        spaces = tuple(
            cut_space(known.graph, known.sizes, known.ops, op_cuts(known.graph, known.sizes, degree), group)
            for known in profiles
        )
        return _candidate(profiles, made, degree, places, [space.fastest() for space in spaces], spaces)
    except ValueError as error:
        raise PlanError(f"tensor_parallel={degree}: {error}") from None


def _candidate(
    profiles: Sequence[ModelProfile],
    made: Layers,
    degree: int,
    places: Cluster,
    found: Sequence[GroupCosts],
    spaces: tuple[CutSpace, ...] = (),
) -> Candidate:
    def chain(known: ModelProfile, one: GroupCosts) -> Chain:
        def crossing(ordered: Graph) -> list[int]:
            return group_traffic(ordered, known.sizes, one.cuts, degree)

        return costed(known.graph, replace(known, ops=one.ops, kinds=()), made, crossing)

    return Candidate(degree, places, tuple(map(chain, profiles, found)), tuple(found), spaces)


def with_less_memory(
    one: Candidate, profiles: Sequence[ModelProfile], made: Layers, batch: int, copies: float
) -> list[Candidate]:
    """The candidate, whose cut of ops is the fastest, and slower ones for the same groups that hold less memory, the
    fastest first: points of the Pareto front of time and memory, each with the least time + price * memory for a price
    in seconds per byte. Left out are those to which another one is at least equal in every layer (`as_good`). `copies`
    is as in `fxpipe.planning.hybrid.event_time.Problem`.

    The memory is that of parameters, and of as many micro-batches as wait in the middle of a pipeline with a stage on
    each group.
    """
    if not one.spaces:  # on single devices there is nothing to cut
        return [one]
    rows, count = [], len(one.cluster.devices)
    for known, space, first in zip(profiles, one.spaces, one.found, strict=True):
        waiting = (1 + min(ceil(batch / known.batch), count)) / 2
        rows.append(frontier(space, first, Counted(copies, waiting)))
    most = max(map(len, rows))
    each = [[row[min(at, len(row) - 1)] for row in rows] for at in range(1, most)]
    left = undominated([one, *(_candidate(profiles, made, one.degree, one.cluster, found) for found in each)])
    fastest = next((other for other in left if as_good(other, one)), one)
    return [fastest, *(other for other in left if other is not fastest)]


def as_good(a: Candidate, b: Candidate) -> bool:
    """Whether a candidate is in every layer as fast as another, with no more memory and no more to send."""
    return bool((a.figures <= b.figures * (1 + SAME)).all())


def undominated(found: Sequence[Candidate]) -> list[Candidate]:
    """Those candidates of one size that no other is as good as. Of equal ones the first stays."""
    return [
        one
        for at, one in enumerate(found)
        if not any(
            as_good(other, one) and not (at < index and as_good(one, other))
            for index, other in enumerate(found)
            if index != at
        )
    ]
