"""What stages cost, from the profile of the ops and the figures of the cluster: the numbers that `balance` works on.

    load = work of the ops + time to receive what crosses the cut before + time to send what crosses the cut after
    held = copies of the parameters + what backward needs of the live micro-batches + what came in for each of them

A value crosses every cut between the op that makes it and its last user, also if it is sent past the stages between.
Gradients come back the same way. Inputs and outputs go between the stage and the caller and are not counted. Nor are
values that depend on nothing but sizes (masks, positions): they are computed again where they are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import ceil

from fxpipe.ir.cluster.cluster import Cluster, link
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.legal_cuts import spans
from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.plan.plan import FORWARD_AGAIN
from fxpipe.ir.plan.profile import OpCost, Profile
from fxpipe.ir.program.cheap_ops import cheap_ops

from .balance import StageCosts

PICOSECONDS = 10**12
# Copies of each parameter that training keeps: itself, its gradient, and the two moments of Adam.
PARAMETER_COPIES = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes across each cut, from position 0 to n: of values forward, and of gradients back."""

    values: tuple[int, ...]
    gradients: tuple[int, ...]


def traffic(graph: Graph, costs: Mapping[str, OpCost]) -> Traffic:
    """What would cross a cut at each position of the graph's own order."""
    count = len(graph.ops) + 1
    values, gradients = [0] * count, [0] * count
    cheap = cheap_ops(graph)
    span = spans(graph)
    for op in graph.ops:
        defined, last = span[op.name]
        size = costs[op.name].output
        if op.name in cheap or last == defined or not size:
            continue
        grows = [values, gradients] if any(t.grad for t in tensors(op.type)) else [values]
        for changes in grows:
            changes[defined + 1] += size
            changes[last + 1] -= size
    return Traffic(tuple(accumulate(values)), tuple(accumulate(gradients)))


def stage_costs(
    graph: Graph,
    profile: Profile,
    cluster: Cluster,
    devices: Sequence[str],
    checkpoints: Sequence[str],
    chunks: int,
    parameter_copies: int = PARAMETER_COPIES,
    further: Sequence[Sequence[str]] | None = None,
) -> list[StageCosts]:
    """What each stage would cost between any two cuts, given its device, its recomputation and its further devices
    (none if not given), which are replicas.

    The profile must be that of one micro-batch, with the times on each kind of device. If the replicas of a stage are
    of several kinds, each op takes as long as on the slowest of them: no less than the stage takes. Stages on one
    device share its memory in equal parts; all `chunks` micro-batches are alive at once.
    """
    crossing = traffic(graph, {cost.name: cost for cost in profile.ops})
    nothing = [0] * (len(graph.ops) + 1)
    hops = [_transfer_times(cluster, a, b, crossing) for a, b in pairwise(devices)]
    crowd = Counter(chain(devices, *(further or ())))
    stages = []
    others = further or [()] * len(devices)
    for s, (device, checkpoint, more) in enumerate(zip(devices, checkpoints, others, strict=True)):
        recomputes = checkpoint in FORWARD_AGAIN
        live = 1 if recomputes else chunks
        replicas = profile.replicas((device, *more))
        own, share = replicas[0]  # bytes are the same everywhere, and the first replica has the largest share
        ops = [own[op.name] for op in graph.ops]
        seconds = (max(_seconds(one[op.name], recomputes) * part for one, part in replicas) for op in graph.ops)
        held = (parameter_copies * op.parameters + ceil(live * op.saved * share) for op in ops)
        stages.append(
            StageCosts(
                work=list(accumulate((round(one * PICOSECONDS) for one in seconds), initial=0)),
                enter=hops[s - 1] if s > 0 else nothing,
                leave=hops[s] if s < len(hops) else nothing,
                bytes=list(accumulate(held, initial=0)),
                hold=[ceil(chunks * came * share) for came in crossing.values] if s > 0 else nothing,
                room=min(cluster.device(label).memory // crowd[label] for label in (device, *more)),
            )
        )
    return stages


def memory_costs(stages: Sequence[StageCosts]) -> list[StageCosts]:
    """The same stages with the share of memory in use as their load, scaled to bytes of the largest device."""
    largest = max(stage.room for stage in stages)
    scaled = []
    for stage in stages:
        work = [held * largest // stage.room for held in stage.bytes]
        enter = [held * largest // stage.room for held in stage.hold]
        scaled.append(StageCosts(work, enter, [0] * len(work), stage.bytes, stage.hold, stage.room))
    return scaled


def _seconds(op: OpCost, recomputes: bool) -> float:
    return op.forward * (2 if recomputes else 1) + op.backward


def _transfer_times(cluster: Cluster, a: str, b: str, crossing: Traffic) -> list[int]:
    """Picoseconds that all values across a cut take from device `a` to `b`, and their gradients back."""
    if a == b:
        return [0] * len(crossing.values)
    way = link(cluster, a, b)

    def seconds(bytes: int) -> float:
        return way.latency + bytes / way.bandwidth if bytes else 0.0

    pairs = zip(crossing.values, crossing.gradients, strict=True)
    return [round((seconds(there) + seconds(back)) * PICOSECONDS) for there, back in pairs]
