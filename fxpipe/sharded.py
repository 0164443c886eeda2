"""From a graph of which every op has a device to generated files that run: the street for strategies.

Placed ─segments─▶ Plan ─lower─▶ Program ─emit─▶ files
                     └───segmented──▶ Schedule

A segment is a stage like any other: a device may have many, and values move from any to any later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .clock import timed
from .errors import PlanError
from .ir.cluster import Cluster
from .ir.faults import check
from .ir.graph import Graph
from .ir.placed import Placed
from .ir.placed import check as check_placed
from .ir.plan import Plan, StagePlan
from .ir.program import Program
from .ir.schedule import Schedule
from .options import Options, make_schedule
from .passes import hold, lower
from .planning.segments import segments
from .profiling import estimate
from .schedules.segmented import segmented
from .simulator.costs import hops, stage_costs, taken_bytes
from .simulator.simulate import simulate
from .street import Build, emitted, lowered_totals


def build(graph: Graph, sizes: Mapping[str, int], cluster: Cluster, options: Options) -> Build:
    """All the values from a graph and its sizes on."""
    assert options.place is not None
    with timed("sharding"):
        placed = hold(options.place(graph, sizes))
        try:
            check_placed(placed, len(options.devices))
        except ValueError as error:
            raise PlanError(str(error)) from None
    with timed("profiling"):
        profile = estimate(placed.graph, sizes, cluster.device(options.devices[0]))
    with timed("planning"):
        seconds = {cost.name: cost.forward for cost in profile.ops}
        decided = _plan(placed, seconds, options)
    trail: dict[str, Program] = {}
    with timed("passes"):
        lowered = lower(placed.graph, decided, watch=trail.__setitem__)
        program = replace(lowered, pipeline=tuple(stages_of(lowered)))
        totals = lowered_totals(graph, decided)
    with timed("simulator"):
        costs = stage_costs(decided, profile, taken_bytes(program, sizes), keeps_at_once=graph.loss is not None)
        schedule = schedule_of(program, options)
        labels = tuple(dict.fromkeys(program.devices))
        timeline = simulate(schedule, costs, hops(program, sizes, cluster), labels)
    files = emitted(program, schedule, decided, profile, totals, graph.loss is not None, by_device=True)
    return Build(
        graph, sizes, cluster, profile, decided, schedule, program, trail, timeline, files, totals, placed.cuts
    )


def _plan(placed: Placed, seconds: Mapping[str, float], options: Options) -> Plan:
    """A stage for each segment. Of one micro-batch, nothing but the last is recomputed in no stage."""
    checkpoint = "never" if (options.checkpoint, options.chunks) == ("except_last", 1) else str(options.checkpoint)
    stages = (
        StagePlan(segment.ops, options.devices[segment.device], checkpoint) for segment in segments(placed, seconds)
    )
    return Plan(placed.graph.model, tuple(stages), options.chunks, str(options.schedule))


def schedule_of(program: Program, options: Options) -> Schedule:
    """The order of a step: that of the stages, each action being those of the stage's segments."""
    chosen = options if program.graph.loss is not None else replace(options, schedule="gpipe")
    took_from, stages = sources(program), program.pipeline
    labels = dict(zip(stages, program.devices, strict=True))
    coarse = make_schedule(chosen, [labels[stage] for stage in range(len(labels))], options.chunks)
    made = segmented(coarse, stages, program.devices, took_from)
    check(made)
    return made


def stages_of(program: Program) -> list[int]:
    """The pipeline stage of each segment. Devices that send values to and fro are of one stage; where values only go
    forward, another stage begins."""
    reaches: dict[str, set[str]] = {device: {device} for device in program.devices}
    for segment, sources_ in reversed(list(enumerate(sources(program)))):
        for source in sources_:
            reaches[program.devices[source]].add(program.devices[segment])
    for _ in reaches:  # as often as a way may be long
        for there in reaches.values():
            there |= set().union(*(reaches[device] for device in there))
    groups = {device: frozenset(d for d in there if device in reaches[d]) for device, there in reaches.items()}
    # A group comes after all those that reach it: they reach more devices.
    order = sorted(dict.fromkeys(groups.values()), key=lambda group: -len(reaches[next(iter(group))]))
    return [order.index(groups[device]) for device in program.devices]


def sources(program: Program) -> Sequence[tuple[int, ...]]:
    """Of each stage those that it takes from."""
    return [
        tuple(sorted({move.source for move in program.moves if move.target == stage.index and move.source >= 0}))
        for stage in program.stages
    ]
