"""Speeds by simulation: training steps on hardware that is not here, with cuts that others chose and with our own.

Ops cost what `estimate` says of the device's data sheet, which is the best that the device could do: nothing here says
how many samples a second a real one trains, but how speeds relate for different cuts, devices and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.program.program import Program
from fxpipe.ir.schedule.schedule import Action, Schedule
from fxpipe.ir.timeline import Timeline
from fxpipe.passes import lower
from fxpipe.planning import plan
from fxpipe.planning.stages.plan_stages import stages
from fxpipe.profiling import estimate
from fxpipe.schedules.one_f_one_b import gpipe
from fxpipe.schedules.simulate.action_costs import hops, stage_costs, taken_bytes
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate

# Tesla P40, from its data sheet, eight of them on PCI Express 3.0 x16.
P40 = Device("cuda", memory=24 * 10**9, flops=11.76e12, bandwidth=346e9)
PCIE = Link(("local", "local"), bandwidth=12e9, latency=10e-6)


@dataclass(frozen=True)
class Setting:
    """How a step is run: a batch in `chunks` micro-batches on `devices` devices."""

    devices: int
    batch: int
    chunks: int
    checkpoint: str = "except_last"

    @property
    def rows(self) -> int:
        """Samples in a micro-batch."""
        return -(-self.batch // self.chunks)


def box(devices: int, device: Device = P40, via: Link = PCIE) -> Cluster:
    return Cluster.of([f"cuda:{d}" for d in range(devices)], gpu=device, via=via)


def profiled(graph: Graph, setting: Setting, device: Device = P40) -> Profile:
    return estimate(graph, sizes(graph, setting), device)


def sizes(graph: Graph, setting: Setting) -> dict[str, int]:
    return {size.name: setting.rows for size in graph.sizes}


# Cuts ---------------------------------------------------------------------------------------------------------------


def our_plans(graph: Graph, setting: Setting, cluster: Cluster) -> tuple[Plan, Plan]:
    """Two plans by time, one that takes transfers for work of both devices, one that takes them for free: the truth
    lies between, and the simulator tells which is nearer. Memory does not bind: the papers' settings fill it in ways
    that are not published."""
    profile = profiled(graph, setting, cluster.devices[0])
    roomy = tuple(replace(device, memory=10**15) for device in cluster.devices)
    free = tuple(replace(link, latency=0.0, bandwidth=1e18) for link in cluster.links)
    dear, cheap = (
        plan(graph, profile, Cluster(roomy, links), chunks=setting.chunks, checkpoint=setting.checkpoint)
        for links in (cluster.links, free)
    )
    return dear, cheap


def their_plan(graph: Graph, setting: Setting, layers: Sequence[int], balance: Sequence[int]) -> Plan:
    """Cuts after so many layers for each stage. `layers` has the number of our ops that each of theirs is: a layer may
    be none, if all that it does is to put a skip aside. A cut that falls between an op and one that writes into its
    result goes to the nearest place where we can cut."""
    if sum(layers) != len(graph.ops) or sum(balance) != len(layers):
        raise ValueError(f"{sum(layers)} ops of {len(graph.ops)} in layers, {sum(balance)} layers of {len(layers)}")
    before = [0, *accumulate(layers)]
    allowed = [p for p, legal in enumerate(legal_cuts(graph)) if legal]
    wanted = [before[at] for at in accumulate(balance[:-1])]
    cuts = (0, *(min(allowed, key=lambda p: abs(p - at)) for at in wanted), len(graph.ops))
    labels = [f"cuda:{d}" for d in range(setting.devices)]
    modes = [setting.checkpoint] * setting.devices
    return Plan(graph.model, stages(graph, graph, cuts, labels, modes), setting.chunks)


# Steps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What the simulator asks for."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    hops: tuple[Hop, ...]
    labels: tuple[str, ...]


def parts(graph: Graph, decided: Plan, setting: Setting, cluster: Cluster, *, portals: bool = True) -> Parts:
    """Without portals, skips are relayed through every stage on their way."""
    trail: dict[str, Program] = {}
    program = lower(graph, decided, watch=trail.__setitem__)
    program = program if portals else trail["cut"]
    numbers = sizes(graph, setting)
    profile = profiled(graph, setting, cluster.devices[0])
    return Parts(
        gpipe(setting.devices, setting.chunks),
        stage_costs(decided, profile, taken_bytes(program, numbers)),
        hops(program, numbers, cluster),
        cluster.labels,
    )


def timeline(these: Parts) -> Timeline:
    """Of a training step."""
    return simulate(these.schedule, these.costs, these.hops, these.labels)


def seconds(these: Parts) -> float:
    """Of a training step."""
    return timeline(these).makespan


def busy(these: Parts) -> float:
    """The share of their time that devices work, on average."""
    line = timeline(these)
    return sum(line.busy) / len(these.labels) / line.makespan


def memory(these: Parts) -> int:
    """The most bytes that each device has in use, all devices together."""
    return sum(timeline(these).high_water)


def memory_without_dependencies(these: Parts) -> int:
    """The same for what `without_dependencies` makes of these, which recomputes all micro-batches on the last device
    before the first backward: it saves for all of them at once. The others save for one."""
    m, last = these.schedule.chunks, len(these.costs) - 1
    return sum(cost.fixed + m * cost.taken + (m if s == last else 1) * cost.saved for s, cost in enumerate(these.costs))


def without_streams(these: Parts) -> Parts:
    """Copies wait for the arithmetic of both devices, and it for them. Recomputation copies nothing."""
    costs = []
    for s, cost in enumerate(these.costs):
        there = sum(hop.forward for hop in these.hops if s in (hop.source, hop.target))
        back = sum(hop.backward for hop in these.hops if s in (hop.source, hop.target))
        again = 0.0 if cost.checkpoint == "never" else there
        costs.append(replace(cost, forward=cost.forward + there, backward=max(0.0, cost.backward + back - again)))
    return replace(these, costs=tuple(costs), hops=())


def without_dependencies(these: Parts) -> Parts:
    """Nothing tells autograd which of the things that are ready should wait. On the last device all recomputations
    are ready at once, and run before the first backward; on the others, each waits for its gradient.

        device n-1   F0 F1 F2 R1 R0 B2 B1 B0        a stage n of its own stands for R: its backward comes first
    """
    n, m = len(these.costs), these.schedule.chunks
    recomputed = (m - 1) / m  # all but the last, spread over all
    costs = [
        replace(cost, backward=cost.backward + recomputed * cost.forward, checkpoint="never")
        for cost in these.costs[:-1]
    ]
    last = these.costs[-1]
    costs += [replace(last, checkpoint="never"), StageCost(0.0, recomputed * last.forward)]
    row = tuple(Action("F", s, i) for i in range(m) for s in (n - 1, n))
    row += tuple(Action("B", s, i) for s in (n, n - 1) for i in reversed(range(m)))
    schedule = Schedule("without dependencies", (*these.schedule.devices[:-1], row))
    return replace(these, schedule=schedule, costs=tuple(costs))


def throughput(graph: Graph, setting: Setting, layers: Sequence[int] = (), balance: Sequence[int] = ()) -> float:
    """Samples a second on P40s, with the cuts of others, if given, or with the better of our own."""
    return setting.rows * setting.chunks / seconds(fastest(graph, setting, layers, balance))


def fastest(graph: Graph, setting: Setting, layers: Sequence[int] = (), balance: Sequence[int] = ()) -> Parts:
    """A step with the cuts of others, if given, or with the better of our own."""
    cluster = box(setting.devices)
    plans = [their_plan(graph, setting, layers, balance)] if balance else our_plans(graph, setting, cluster)
    return min((parts(graph, one, setting, cluster) for one in plans), key=seconds)


# The layers of torchgpipe's models ----------------------------------------------------------------------------------


def amoebanet_layers(graph: Graph) -> tuple[int, ...]:
    """The stem, each cell, the classifier."""
    layer = 0
    counts: dict[int, int] = {}
    for op in graph.ops:
        path = op.origin.module.split(".")
        if path[0] == "cells":
            layer = 1 + int(path[1])
        counts[layer] = counts.get(layer, 0) + 1
    head = next(at for at, op in enumerate(reversed(graph.ops)) if op.origin.module.startswith("cells"))
    counts[layer] -= head
    return (*(counts[at] for at in sorted(counts)), head)


def unet_layers(blocks: int, depth: int = 5) -> tuple[int, ...]:
    """Each block is four layers; a skip is stashed by a layer that does nothing else.

    >>> len(unet_layers(5)), sum(unet_layers(5))
    (241, 236)
    """
    cell = (1, 1, 1, 1) * blocks
    return (*(*cell, 0, 1) * depth, *cell, *(1, 1, *cell) * depth, 1)


def resnet_layers(blocks: Sequence[int] = (3, 4, 23, 3)) -> tuple[int, ...]:
    """A batch norm is two ops, one of them its counter. A bottleneck begins with a layer that stashes the input; our
    downsampling stands there, theirs where the branches meet.

    >>> len(resnet_layers()), sum(resnet_layers())
    (370, 449)
    """
    return (1, 2, 1, 1, *_bottlenecks(blocks), 1, 1, 1)


def _bottlenecks(blocks: Sequence[int]) -> Iterator[int]:
    for count in blocks:
        for index in range(count):
            yield from (0 if index else 3, 1, 2, 1, 1, 2, 1, 1, 2, 1, 1)
