"""Simulates a hybrid plan: the input of `simulate` from the plan, a chain of layers and a cluster.

Replicas of a stage share each micro-batch, so a stage costs the largest share of its layers; its transfers split and
join the samples between replicas, and its all-reduce is over its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.network import all_reduce, split_concat
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, replica_group
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.ir.replica_shares import largest_share
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline

from .simulate import Hop, Reduction, StageCost, simulate


def _cost(chain: Chain, stage: HybridStage, copies: float) -> StageCost:
    share, layers = largest_share(chain.samples, len(stage.devices)), slice(stage.first, stage.end)
    return StageCost(
        sum(layer.forward for layer in chain.layers[layers]) * share,
        sum(layer.backward for layer in chain.layers[layers]) * share,
        saved=round(sum(layer.saved for layer in chain.layers[layers]) * share),
        taken=round(chain.cuts[stage.first] * share),
        fixed=round(copies * sum(layer.parameters for layer in chain.layers[layers])),
        checkpoint="always" if stage.recompute else "never",
    )


def _reductions(chain: Chain, cluster: Cluster, plan: HybridPlan, s: int) -> Iterator[Reduction]:
    """One for the stage, or one per layer from its last to its first."""
    stage = plan.stages[s]
    layers, share = chain.layers[stage.first : stage.end], largest_share(chain.samples, len(stage.devices))
    if len(stage.devices) == 1:
        return
    rate = all_reduce(cluster, stage.devices)
    if plan.all_reduce == "end":
        yield Reduction(s, rate.seconds(sum(layer.parameters for layer in layers)))
        return
    early = sum(layer.backward for layer in layers) * share
    for layer in reversed(layers):
        early -= layer.backward * share
        yield Reduction(s, rate.seconds(layer.parameters), max(early, 0.0), layer.name)


def simulate_hybrid(
    chain: Chain, cluster: Cluster, plan: HybridPlan, schedule: Schedule, copies: float = 2
) -> Timeline:
    """The timeline of a step of `plan` in the order of `schedule`. `chain` has costs at the size of the plan's
    micro-batches; `copies` is how many bytes are in memory for each byte of parameters. Raises ValueError if the
    schedule is not one for the plan."""
    if schedule.chunks != plan.micro_batches or len(schedule.devices) != len(plan.stages):
        raise ValueError(
            f"the schedule {schedule.name!r} is for {len(schedule.devices)} stages and {schedule.chunks} micro-batches;"
            f" the plan has {len(plan.stages)} and {plan.micro_batches}"
        )
    hops = []
    for s, (a, b) in enumerate(pairwise(plan.stages)):
        count = chain.cuts[b.first]
        there = split_concat(cluster, a.devices, b.devices, chain.samples).seconds(count)
        back = split_concat(cluster, b.devices, a.devices, chain.samples).seconds(count)
        hops.append(Hop(s, s + 1, there, back))
    return simulate(
        schedule,
        [_cost(chain, stage, copies) for stage in plan.stages],
        hops,
        [replica_group(cluster, stage) for stage in plan.stages],
        [one for s in range(len(plan.stages)) for one in _reductions(chain, cluster, plan, s)],
    )
