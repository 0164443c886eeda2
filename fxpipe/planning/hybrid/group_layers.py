"""From ops to layers: groups the ops of a graph into a chain with few places for cuts, where cutting is cheap.

Planners of whole clusters search over cuts, replicas and devices at once, and cannot do that over thousands of ops.
Ops are ordered so that the least crosses cuts. Of all legal cuts those stay that leave even layers and that few bytes
cross. Cuts are removed one by one, always the one with the least

    geometric mean of the two layers that it parts   by share of time, of parameters or of saved bytes, whichever is
    ----------------------------------------------   largest: a layer that is tiny joins a neighbour, however large
    bytes that cross it                              that is; even layers join evenly

    conv | norm | relu | conv | add         bytes  8 4 4 8       norm and relu join what is before them: they are
    conv   norm   relu | conv   add                8 . 4 .       small, and most crosses inside the block

Where a layer is small, it may join either neighbour: of its two cuts the one goes that more bytes cross. So the cut
behind the sum at the end of a block stays, and not the one in front of it, where two values cross. Of cuts that are
alike those stay that are between modules: a layer of a transformer is cut from the next, rather than its attention from
the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise, takewhile
from math import sqrt

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Graph, Op
from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.profile import OpCost, Profile, total
from fxpipe.planning.stages.cut_costs import traffic
from fxpipe.planning.stages.op_order import arrange
from fxpipe.planning.stages.plan_stages import check_profiled, inner_cuts

MOST = 64
BETWEEN = 0.05  # by which share a cut between modules is worth more
Crossing = Callable[[Graph], Sequence[int]]  # bytes by position, from 0 to the number of ops


@dataclass(frozen=True)
class Layers:
    """A chain, and the ops of each of its layers, by name."""

    chain: Chain
    ops: tuple[tuple[str, ...], ...]


def layers(graph: Graph, profile: Profile, most: int = MOST) -> Layers:
    """At most `most` layers, with the costs of a micro-batch of the profile's size. What crosses a cut is all that was
    made before it and is used after it, skips included. Raises PlanError if the profile is not one of the graph, or
    `most` is below 1."""
    if most < 1:
        raise PlanError(f"a chain of at most {most} layers; it has at least one")
    check_profiled(graph, profile)
    costs = {cost.name: cost for cost in profile.ops}
    ordered = arrange(graph, costs)
    ops = [costs[op.name] for op in ordered.ops]
    crossing = traffic(ordered, costs).values
    modules = [op.origin.module for op in ordered.ops]
    ends = [0, *_cheapest(ops, crossing, inner_cuts(ordered), most, modules), len(ops)]
    names = tuple(tuple(op.name for op in ordered.ops[first:end]) for first, end in pairwise(ends))
    return Layers(_chain(ordered, profile, crossing, ends), names)


def costed(graph: Graph, profile: Profile, made: Layers, crossing: Crossing | None = None) -> Chain:
    """The same layers with the costs of another profile. `crossing` gives the bytes that cross the cuts of a graph, if
    not all that was made before a cut and is used after it crosses as a whole."""
    at = {op.name: op for op in graph.ops}
    ordered = replace(graph, ops=tuple(at[name] for names in made.ops for name in names))
    ends = list(accumulate(map(len, made.ops), initial=0))
    if crossing is not None:
        return _chain(ordered, profile, crossing(ordered), ends)
    return _chain(ordered, profile, traffic(ordered, {cost.name: cost for cost in profile.ops}).values, ends)


def _chain(ordered: Graph, profile: Profile, crossing: Sequence[int], ends: Sequence[int]) -> Chain:
    """The layers between neighbouring `ends`."""
    costs = {cost.name: cost for cost in profile.ops}
    rows = []
    for first, end in pairwise(ends):
        ops = ordered.ops[first:end]
        cut = crossing[end] if end < len(ordered.ops) else 0
        rows.append(_layer(ops, [costs[op.name] for op in ops], cut))

    def sums(seconds: Sequence[float]) -> tuple[float, ...]:
        by_name = {cost.name: one for cost, one in zip(profile.ops, seconds, strict=True)}
        return tuple(sum(by_name[op.name] for op in ordered.ops[first:end]) for first, end in pairwise(ends))

    kinds = (KindTimes(one.kind, sums(one.forwards), sums(one.backwards)) for one in profile.kinds)
    return Chain(ordered.model, profile.batch, tuple(rows), kinds=tuple(kinds))


def _layer(ops: Sequence[Op], costs: Sequence[OpCost], cut: int) -> Layer:
    """The layer of these ops, named after the module of its slowest op."""
    own = total(costs)
    longest = max(range(len(ops)), key=lambda at: costs[at].forward + costs[at].backward)
    name = ops[longest].origin.module or ops[longest].name
    return Layer(name, own.forward, own.backward, own.parameters, own.saved, cut)


def _cheapest(
    ops: Sequence[OpCost], crossing: Sequence[int], cuts: Sequence[int], most: int, modules: Sequence[str]
) -> list[int]:
    """The cuts that stay, at most one less than the layers. `modules`: the path of the module of each op."""
    weights = _weights(ops)
    kept, stamp = list(cuts), dict.fromkeys(cuts, 0)
    least = max(1, *(crossing[p] for p in cuts)) / 100 if cuts else 1.0

    def beside(p: int) -> tuple[int, int]:
        """The neighbours of a cut."""
        at = bisect_left(kept, p)
        return kept[at - 1] if at else 0, kept[at + 1] if at + 1 < len(kept) else len(ops)

    def worth(p: int) -> float:
        low, high = beside(p)
        even = max(sqrt((w[high] - w[p]) * (w[p] - w[low])) for w in weights)
        return even / max(crossing[p], least) * (1 + BETWEEN / (1 + _nesting(modules[p - 1], modules[p])))

    def joined(p: int) -> int:
        """The cut of the smaller layer beside `p` that more bytes cross: `p`, or the layer's other one."""
        low, high = beside(p)
        before, after = (max(w[b] - w[a] for w in weights) for a, b in ((low, p), (p, high)))
        other = low if before < after else high
        return other if other in stamp and crossing[other] > crossing[p] else p

    heap = [(worth(p), p, 0) for p in cuts]
    heapify(heap)
    while len(kept) > most - 1:
        _, p, turn = heappop(heap)
        if stamp.get(p) != turn:
            continue  # a neighbour has gone since
        if (gone := joined(p)) != p:
            heappush(heap, (worth(p), p, turn))
            p = gone
        at = bisect_left(kept, p)
        del kept[at], stamp[p]
        for q in kept[max(at - 1, 0) : at + 1]:
            stamp[q] += 1
            heappush(heap, (worth(q), q, stamp[q]))
    return kept


def _nesting(one: str, other: str) -> int:
    """How many modules two ops are both in, by the paths of their modules.

    >>> _nesting("layers.0", "layers.1.norm"), _nesting("layers.1", "layers.1.norm"), _nesting("", "layers.1")
    (1, 2, 0)
    """
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] != "", pairs))


def _weights(ops: Sequence[OpCost]) -> list[list[float]]:
    """Running sums of the shares of time, parameters and saved bytes."""
    columns = (
        [op.forward + op.backward for op in ops],
        [float(op.parameters) for op in ops],
        [float(op.saved) for op in ops],
    )
    return [list(accumulate((value / (sum(column) or 1.0) for value in column), initial=0.0)) for column in columns]


def as_plan(graph: Graph, made: Layers, hybrid: HybridPlan, labels: Sequence[str], schedule: str) -> Plan:
    """The plan of ops for a plan of layers; `labels` are those of the cluster's devices. Within a stage ops run in
    captured order."""
    captured = {op.name: position for position, op in enumerate(graph.ops)}
    stages = []
    for stage in hybrid.stages:
        ops = [name for layer in made.ops[stage.first : stage.end] for name in layer]
        size = stage.tensor_parallel
        device, *others = (labels[position] for position in stage.devices[::size])
        mode = "always" if stage.recompute else "never"
        named = tuple(sorted(ops, key=captured.__getitem__))
        stages.append(StagePlan(named, device, mode, replicas=tuple(others), tensor_parallel=size))
    return Plan(
        graph.model,
        tuple(stages),
        hybrid.micro_batches,
        schedule,
        optimizer_sharding=hybrid.optimizer_sharding,
    )
