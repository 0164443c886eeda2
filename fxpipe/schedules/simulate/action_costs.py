"""The simulator's input from a plan and a profile: what stages and the hops between them cost.

A tensor that several stages share (a loan) is sent once a step, not once per micro-batch, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from fxpipe.ir.cluster.cluster import Cluster, link
from fxpipe.ir.cluster.network import all_reduce, split_concat
from fxpipe.ir.graph.value_types import nbytes, tensors
from fxpipe.ir.plan.plan import FORWARD_AGAIN, Plan, StagePlan
from fxpipe.ir.plan.profile import OpCost, Profile, total
from fxpipe.ir.program.device_programs import ALL_REDUCE
from fxpipe.ir.program.kept_bytes import KeptBytes, Memory, size
from fxpipe.ir.program.program import Collective, Program

from .replica_costs import positions
from .simulate import Hop, StageCost


def stage_costs(
    plan: Plan,
    profile: Profile,
    taken: Sequence[int] = (),
    copies: int = 2,
    keeps_at_once: bool = False,
    kept: Sequence[KeptBytes | None] = (),
    program: Program | None = None,
) -> tuple[StageCost, ...]:
    """A cost for each stage of `plan`, from a profile of one of its micro-batches, which the replicas of a stage share:
    a stage takes as long as its slowest replica, and holds what the one with the most samples does.

    - `taken`: bytes that each stage takes per micro-batch, see `taken_bytes`; none if left out.
    - `copies`: how often a parameter is in memory: 2 for it and its gradient, more with the optimizer's state.
    - `keeps_at_once`: whether nothing is recomputed if backward directly follows forward.
    - `kept`: what each stage keeps, if that is known better than from the profile.
    - `program`: what the plan has become; it tells what a stage with checkpoint "selective" recomputes.
    """
    found = []
    for index, stage in enumerate(plan.stages):
        lowered = None if program is None else program.stages[index]
        again = lowered.backward.repeats if lowered is not None and lowered.backward is not None else {}
        replicas = [(_total(costs, stage, again), share) for costs, share in profile.replicas(stage.devices)]
        own, share = replicas[0]  # bytes are the same everywhere, and the first replica has the largest share
        exact = _slice(kept[index] if kept else None, share)
        found.append(
            StageCost(
                max(one.forward * part for one, part in replicas),
                max(one.backward * part for one, part in replicas),
                saved=ceil(own.saved * share) if exact is None else size(exact.saved),
                taken=ceil((taken[index] if taken else 0) * share) if exact is None else size(exact.taken),
                kept=exact,
                fixed=own.parameters * copies,
                checkpoint=lowered.checkpoint if lowered and stage.checkpoint == "selective" else stage.checkpoint,
                keeps_at_once=keeps_at_once,
            )
        )
    return tuple(found)


def _total(costs: Mapping[str, OpCost], stage: StagePlan, again: Mapping[str, float]) -> OpCost:
    """The cost of all ops of a stage. `again`: the share of their forward that backward runs again."""
    found = total([costs[op] for op in stage.ops])
    more = sum(costs[op].forward * share for op, share in again.items() if op in costs)
    return replace(found, backward=found.backward + more) if more else found


def _slice(kept: KeptBytes | None, share: float) -> KeptBytes | None:
    """What a replica keeps that has this share of each micro-batch."""
    if kept is None or share == 1:
        return kept

    def part(memory: Memory) -> Memory:
        return {piece: ceil(count * share) for piece, count in memory.items()}

    return KeptBytes(part(kept.saved), part(kept.taken), part(kept.handed))


def fitting(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> int:
    """How many micro-batches fit into the memory of every device at once, at least 1: D of DAPPLE, section V."""
    fixed: dict[str, int] = {}
    for stage, cost in zip(plan.stages, costs, strict=True):
        again = cost.saved if stage.checkpoint in FORWARD_AGAIN else 0
        fixed[stage.device] = fixed.get(stage.device, 0) + cost.fixed + again
    fits = [plan.chunks]
    for stage, cost in zip(plan.stages, costs, strict=True):
        each = cost.taken if stage.checkpoint in FORWARD_AGAIN else cost.saved
        room = min(cluster.device(label).memory for label in stage.devices) - fixed[stage.device]
        fits += [room // each] if each else []
    return max(1, min(fits))


def taken_bytes(program: Program, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The bytes that each stage takes for a micro-batch; `sizes` has a number for each symbolic size."""
    return tuple(sum(nbytes(program.types[name], sizes) for name in stage.takes) for stage in program.stages)


def hops(program: Program, sizes: Mapping[str, int], cluster: Cluster, samples: int | None = None) -> tuple[Hop, ...]:
    """A hop for each pair of stages that values move between: all values one after the other over the pair's link, and
    back the gradients of those that have one. The caller's inputs and outputs are not counted. `samples`: those of a
    micro-batch, which replicas share; with None, shares are ideal."""
    found = [_hop(program, sizes, cluster, samples, *ends, values) for ends, values in _moved(program)]
    return (*found, *(hop for one in program.collectives for hop in _group_hops(program, sizes, cluster, one)))


def _group_hops(program: Program, sizes: Mapping[str, int], cluster: Cluster, one: Collective) -> Iterator[Hop]:
    """The hops of a collective: it occupies the links between all devices of its group. A reduce-scatter or all-gather
    is half of an all-reduce of the whole."""
    rate = all_reduce(cluster, positions(cluster, [program.stages[move.source].device for move in one.moves]))
    (kind,) = tensors(program.types[one.moves[0].value])
    whole = max(nbytes(program.types[name], sizes) for name in (one.moves[0].given, one.moves[0].value))
    forward = rate.seconds(whole) * (1 if one.kind == ALL_REDUCE else 0.5)
    backward = forward if kind.grad else 0.0
    yield from (Hop(a, b, forward, backward, name) for a, b, name in _pairs(one))


def _pairs(one: Collective) -> Iterator[tuple[int, int, str]]:
    """The stages that give a part, each with the stages of other devices that take what is made of it."""
    for a in one.moves:
        yield from ((a.source, b.target, f"{one.kind} of {b.value}") for b in one.moves if b != a)


def _moved(program: Program) -> list[tuple[tuple[int, int], list[str]]]:
    """The values that go from stage to stage, by the pair of stages."""
    moved: dict[tuple[int, int], list[str]] = {}
    for move in program.moves:
        if move.source >= 0 and move.target < len(program.stages):
            moved.setdefault((move.source, move.target), []).append(move.value)
    return sorted(moved.items())


def _hop(
    program: Program,
    sizes: Mapping[str, int],
    cluster: Cluster,
    samples: int | None,
    source: int,
    target: int,
    values: Sequence[str],
) -> Hop:
    types = [tensor for value in values for tensor in tensors(program.types[value])]
    forward = sum(tensor.nbytes(sizes) for tensor in types)
    backward = sum(tensor.nbytes(sizes) for tensor in types if tensor.grad)

    def seconds(count: int) -> float:
        a, b = program.stages[source], program.stages[target]
        if not count or a.device == b.device:
            return 0.0
        if a.replicas or b.replicas:
            ends = positions(cluster, a.devices), positions(cluster, b.devices)
            return split_concat(cluster, *ends, samples).seconds(count)
        way = link(cluster, a.device, b.device)
        return way.latency + count / way.bandwidth

    return Hop(source, target, seconds(forward), seconds(backward), ", ".join(values))
