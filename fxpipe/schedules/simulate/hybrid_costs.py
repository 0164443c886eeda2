"""Simulates a hybrid plan: the input of `simulate` from the plan, a chain of layers and a cluster.

Replicas of a stage share each micro-batch and move in lock-step, so a stage takes as long as its slowest replica, and
memory is counted for the largest share; its transfers split and join the samples between replicas, and its all-reduce
is over its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_groups import grouped, positions
from fxpipe.ir.cluster.network import Rate, all_gather, all_reduce, hand_over
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, ranges, replica_group
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.ir.plan.model_states import model_states
from fxpipe.ir.replica_shares import dealt, largest_share
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline
from fxpipe.schedules.make_schedule import make

from .simulate import Hop, Reduction, StageCost, simulate


def stage_cost(
    chain: Chain, cluster: Cluster, stage: HybridStage, copies: float = 2, optimizer_sharding: str = "none"
) -> StageCost:
    """What a stage costs for a micro-batch; `chain` has the costs of its way, `copies` is as in `simulate_hybrid`."""
    share, layers = largest_share(chain.samples, stage.replicas), slice(stage.first, stage.end)
    replicas = _replicas(chain, cluster, stage)
    states = model_states(chain, stage.first, stage.end, stage.replicas, copies, optimizer_sharding)
    gather = 0.0  # for each use of the parameters, and for their gradients
    if optimizer_sharding == "zero3" and stage.replicas > 1:
        rate = all_gather(_ring(cluster, stage))
        gather = sum(rate.seconds(layer.parameters) for layer in chain.layers[layers])
    return StageCost(
        max(sum(layer.forward for layer in own) * part for own, part in replicas) + gather,
        max(sum(layer.backward for layer in own) * part for own, part in replicas) + 2 * gather,
        saved=round(sum(layer.saved for layer in chain.layers[layers]) * share),
        taken=round(chain.cuts[stage.first] * share),
        fixed=round(sum(states)),
        checkpoint="always" if stage.recompute else "never",
    )


def _replicas(chain: Chain, cluster: Cluster, stage: HybridStage) -> list[tuple[tuple[Layer, ...], float]]:
    """For each replica that has samples the layers with their times on its device, and its share of a micro-batch."""
    r, samples = stage.replicas, chain.samples
    shares = [1 / r] * r if samples is None else [count / samples for count in dealt(samples, r)]
    kinds = [chain.kind_of(cluster.labels[device]) for device in stage.devices[:: stage.tensor_parallel]]
    different = dict.fromkeys((kind, share) for kind, share in zip(kinds, shares, strict=True) if share)
    return [(chain.on(kind).layers[stage.first : stage.end], share) for kind, share in different]


def _ring(cluster: Cluster, stage: HybridStage) -> Rate:
    """The rate of an all-reduce of the stage's replicas."""
    size = stage.tensor_parallel
    return all_reduce(grouped(cluster, size), positions(cluster, size, stage.devices))


def _reductions(chain: Chain, cluster: Cluster, plan: HybridPlan, s: int) -> Iterator[Reduction]:
    """One for the stage, or one per layer from its last to its first; none if each backward has scattered them."""
    stage = plan.stages[s]
    layers, replicas = chain.layers[stage.first : stage.end], _replicas(chain, cluster, stage)
    if stage.replicas == 1 or plan.optimizer_sharding == "zero3":
        return
    rate = _ring(cluster, stage)
    if plan.all_reduce == "end":
        yield Reduction(s, rate.seconds(sum(layer.parameters for layer in layers)))
        return
    ends = [  # of each layer's backward, from the start of that of the stage
        max(sum(layer.backward for layer in own[at:]) * part for own, part in replicas) for at in range(len(layers))
    ]
    for layer, end in zip(reversed(layers), reversed(ends), strict=True):
        yield Reduction(s, rate.seconds(layer.parameters), ends[0] - end, layer.name)


def rows(stages: Sequence[HybridStage]) -> tuple[tuple[int, ...], ...]:
    """The devices of each row of a schedule, in order of first appearance: all replicas have one row."""
    return tuple(dict.fromkeys(stage.devices for stage in stages))


def order_of(schedule: str, plan: HybridPlan) -> Schedule:
    """The schedule of this name, or of this grid, for a plan. Raises ValueError if there is none."""
    return make(schedule, [ranges(stage.devices) for stage in plan.stages], plan.micro_batches)


def simulate_hybrid(
    chains: Sequence[Chain], cluster: Cluster, plan: HybridPlan, schedule: Schedule, copies: float = 2
) -> Timeline:
    """The timeline of a step of `plan` in the order of `schedule`, as from `order_of`. `chains` have the costs of each
    way that stages have, at the size of the plan's micro-batches; `copies` is how many bytes are in memory for each
    byte of parameters. Raises ValueError if the schedule is not one for the plan."""
    if schedule.chunks != plan.micro_batches or schedule.num_stages != len(plan.stages):
        raise ValueError(
            f"the schedule {schedule.name!r} is for {schedule.num_stages} stages and {schedule.chunks} micro-batches;"
            f" the plan has {len(plan.stages)} and {plan.micro_batches}"
        )
    hops = []
    for s, (a, b) in enumerate(pairwise(plan.stages)):
        count, samples = chains[b.way].cuts[b.first], chains[b.way].samples
        there, back = hand_over(cluster, a.groups, b.groups, samples)
        hops.append(Hop(s, s + 1, there.seconds(count), back.seconds(count)))
    return simulate(
        schedule,
        [stage_cost(chains[stage.way], cluster, stage, copies, plan.optimizer_sharding) for stage in plan.stages],
        hops,
        [replica_group(cluster, devices) for devices in rows(plan.stages)],
        [one for s, stage in enumerate(plan.stages) for one in _reductions(chains[stage.way], cluster, plan, s)],
    )
