"""The build for strategies: from a graph with a device for every op to generated files that run.

Placed ─segments─▶ Plan ─lower─▶ Program ─emit─▶ files
                     └───segmented──▶ Schedule

A segment is a stage: a device may have many of them, and values move from a segment to any later one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.collective_patterns import CollectivePattern, collective_patterns
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.program import Program
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.passes import lower, rewrite_placed
from fxpipe.pipe.options.chosen_options import lines_of_strategy
from fxpipe.pipe.options.compile_options import Options, make_schedule
from fxpipe.pipe.options.user_passes import passes_of
from fxpipe.pipe.progress import timed
from fxpipe.planning import owners
from fxpipe.planning.stages.device_segments import segments
from fxpipe.profiling import estimate, on_kinds
from fxpipe.schedules.make_schedule import make
from fxpipe.schedules.simulate.action_costs import hops, stage_costs, taken_bytes
from fxpipe.schedules.simulate.simulate import simulate
from fxpipe.schedules.stage_segments import segmented

from .apply_strategy import TensorParallelPlacement, strategy_of, with_first_graph
from .build import Build, emitted, on_whole_batch
from .step_schedule import check_write_order, refuse_epilogue


def build(
    graph: Graph,
    sizes: Mapping[str, int],
    cluster: Cluster,
    options: Options,
    known: Mapping[str, str] | None = None,
    first: Graph | None = None,
) -> Build:
    """The build for a graph and the numbers of its symbolic sizes.

    - `known`: over ranks, the devices that own tensors of the model already, by path.
    - `first`: the graph of the first kind of call; None for that one.
    """
    assert options.place is not None
    refuse_epilogue(graph, "and a strategy runs micro-batches alone: write chunks=1, or reduce=")
    trail: dict[str, Program | Placed] = {}
    place = with_first_graph(options.place, first)
    if options.ranks and isinstance(place, TensorParallelPlacement):
        place = replace(place, whole_sums=True)
    with timed("sharding"):
        placed = rewrite_placed(place(graph, sizes), len(options.devices), trail.__setitem__)
    with timed("profiling"):
        label = options.devices[0]
        alone = estimate(placed.graph, sizes, cluster.device(label))
        profile = on_kinds(placed.graph, sizes, alone, cluster, label)
    with timed("planning"):
        where = {op: options.devices[device] for op, device in placed.devices.items()}
        seconds = {cost.name: profile.on(where[cost.name])[cost.name].forward for cost in profile.ops}
        patterns = collective_patterns(placed) if options.ranks else ()
        owned = owners(placed, options.devices, known or None) if options.ranks else {}
        decided = _plan(placed, seconds, options, patterns, owned.values())
    with timed("passes"):
        program = lower(
            placed.graph,
            decided,
            trail.__setitem__,
            passes_of(options),
            segmented=True,
            owners=owned,
            patterns=patterns,
        )
        whole = on_whole_batch(graph, program)
    with timed("simulator"):
        costs = stage_costs(decided, profile, taken_bytes(program, sizes), keeps_at_once=graph.loss is not None)
        schedule = schedule_of(program, options)
        check_write_order(schedule, program)
        labels = tuple(dict.fromkeys(program.devices))
        between = hops(program, sizes, cluster)
    as_steps = graph.loss is not None or options.ranks
    files = emitted(program, schedule, decided, profile, whole, as_steps, by_device=True)
    # Only when asked for: no decision needs it, and with many micro-batches and segments it takes the longest time.
    simulated = partial(simulate, schedule, costs, between, labels)
    return Build(
        graph, sizes, cluster, profile, decided, schedule, program, trail, simulated, files, whole, placed.cuts,
        chosen=lines_of_strategy(options, graph),
    )  # fmt: skip


def _plan(
    placed: Placed,
    seconds: Mapping[str, float],
    options: Options,
    patterns: Sequence[CollectivePattern],
    owning: Collection[str],
) -> Plan:
    """A plan with a stage for each segment, and one without ops on each device of `owning`, which owns tensors, that
    computes nothing. "except_last" with one micro-batch recomputes nothing: "never". Segments that the strategy
    recomputes always do; those of a plan are as the plan's stage."""
    if isinstance(options.place, TensorParallelPlacement):
        modes = options.place.checkpoints
    else:
        mode = "never" if (options.checkpoint, options.chunks) == ("except_last", 1) else str(options.checkpoint)
        modes = (mode,) * len(options.devices)
    stages = [
        StagePlan(one.ops, options.devices[one.device], "always" if one.again else modes[one.device])
        for one in segments(placed, seconds, patterns)
    ]
    computing = {stage.device for stage in stages}
    stages += [StagePlan((), label, "never") for label in options.devices if label in owning and label not in computing]
    return Plan(placed.graph.model, tuple(stages), options.chunks, str(options.schedule))


def schedule_of(program: Program, options: Options) -> Schedule:
    """The schedule of a step: that of the pipeline's stages, with each action replaced by those of the stage's
    segments. Of a strategy's own micro-batches, 1F1B runs one after the other, so that a device keeps one at a time."""
    stages = program.pipeline
    strategy = strategy_of(options.place)
    limit = 1 if strategy and strategy.micro_batches > 1 else None
    labels = dict(zip(stages, program.devices, strict=True))
    devices = [labels[stage] for stage in range(len(labels))]
    if program.graph.loss is None and options.ranks:
        coarse = make("forward-only", devices, options.chunks)
    else:
        chosen = options if program.graph.loss is not None else replace(options, schedule="gpipe")
        coarse = make_schedule(chosen, devices, options.chunks, limit)
    return segmented(coarse, stages, program.devices, program.sources)
