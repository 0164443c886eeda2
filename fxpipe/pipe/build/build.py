"""The whole build: from a captured graph to generated files that run, as functions between immutable values.

Graph ─profile─▶ Profile ─plan─▶ Plan ─gpipe─▶ Schedule ─simulate─▶ Timeline
  └───────────lower───────────────┴─▶ Program ─emit─▶ files ─load─▶ package
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fxpipe.codegen.package.package_files import package
from fxpipe.codegen.scheduler.forward_scheduler import emit_scheduler
from fxpipe.codegen.scheduler.step_scheduler import emit_steps
from fxpipe.codegen.stage.stage_note import note
from fxpipe.errors import MixedSamplesWarning, PlanError, warn
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.operators.operators import Operator
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Config
from fxpipe.ir.plan import plan as plans
from fxpipe.ir.plan import plan_file
from fxpipe.ir.plan.plan import WHOLE_MODES, Plan, StagePlan, replica_groups, without_replicas
from fxpipe.ir.plan.plan_file import PlanFile, placed
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.program.kept_bytes import KeptBytes
from fxpipe.ir.program.program import Program
from fxpipe.ir.program.whole_batch import ALONE, WholeBatch
from fxpipe.ir.schedule.action_times import Times
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.schedule.sub_schedule import only
from fxpipe.ir.timeline import KEPT, WITH_PARAMETERS, Timeline
from fxpipe.passes import lower
from fxpipe.pipe.options.chosen_options import chosen_lines
from fxpipe.pipe.options.compile_options import Options, schedule_text
from fxpipe.pipe.options.memory_limit import fits, memory_limits, parameter_copies, too_small
from fxpipe.pipe.options.option_choices import choices
from fxpipe.pipe.progress import timed
from fxpipe.pipe.saved.model_fingerprint import Fingerprint
from fxpipe.planning import Placement, plan, plan_like, with_loss
from fxpipe.profiling import on_kinds
from fxpipe.schedules.auto_checkpoint import NothingFits, auto_checkpoint, check_memory
from fxpipe.schedules.auto_schedule import auto
from fxpipe.schedules.make_schedule import AUTO, SCHEDULES
from fxpipe.schedules.overlap_pairs import overlapped
from fxpipe.schedules.simulate.action_costs import fitting, hops, stage_costs, taken_bytes
from fxpipe.schedules.simulate.merge_backward_halves import merge_backward_halves
from fxpipe.schedules.simulate.replica_costs import reductions, spread
from fxpipe.schedules.simulate.simulate import StageCost, simulate

from .batch_statistics import BatchNorm, batch_norms
from .checkpoint_choice import chosen, where_it_saves
from .lowering import Lowered, Lowering
from .step_schedule import check_write_order, refuse_epilogue, schedule_of


@dataclass(frozen=True, eq=False)
class Build:
    """Everything made for one kind of call; builds are compared by identity.

    - `sizes`: the symbolic sizes of the micro-batch that profile and timeline are for.
    - `trail`: the program after each pass that changed it, by the pass's name; with a strategy, the placed graph first.
    - `simulated`: predicts the `timeline`; it is called when that is asked for.
    - `files`: the generated package.
    - `whole`: what runs on the whole batch.
    - `cuts`: how a strategy cuts each operator.
    - `source`: the fingerprint of the model that was captured.
    - `kept`: what each stage keeps of a micro-batch, where its backward is code.
    - `memory`: with `memory_limit`, by device the bytes that it needs at most, and its limit.
    - `pairs`, `chosen`: lines about overlapped pairs, with overlap_pairs=True, and about options that are "auto".
    """

    graph: Graph
    sizes: Mapping[str, int]
    cluster: Cluster
    profile: Profile
    plan: Plan
    schedule: Schedule
    program: Program
    trail: Mapping[str, Program | Placed]
    simulated: Callable[[], Timeline]
    files: Mapping[str, str]
    whole: WholeBatch = ALONE
    cuts: tuple[tuple[Operator, Config], ...] = ()
    source: Fingerprint | None = None
    kept: tuple[KeptBytes | None, ...] = ()
    memory: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pairs: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted timeline of a step, or of a call."""
        return self.simulated()

    @property
    def batch_norms(self) -> tuple[BatchNorm, ...]:
        """The norms that use the statistics of their batch."""
        return batch_norms(self.graph)


def build(
    graph: Graph,
    profile: Profile,
    sizes: Mapping[str, int],
    cluster: Cluster,
    options: Options,
    home: Placement | None,
    owners: Mapping[str, str],
) -> Build:
    """The build for a graph and its profile. With a `home`, ops go to the stages of their parameters. `owners`: the
    devices that own tensors of the model already, by path. If several schedules may be used, the fastest is taken;
    schedules that are not possible (a small model may have too few ops for several stages on each device) are left out.
    Raises the first PlanError if none is possible. The profile gets the times on the cluster's other kinds of devices;
    it is for its own device, or if that is not in the cluster, for the first one of the pipe."""
    with timed("profiling"):
        profile = on_kinds(graph, sizes, profile, cluster, options.devices[0])
    made: list[Build] = []
    refusals: list[PlanError] = []
    tried = choices(graph, options, None if home is None else home.plan)
    possible: list[Options] = []
    lowering, later = Lowering(graph, options, sizes, owners), options.saves_only and len(tried) > 1
    for choice in tried:
        try:
            made.append(draft(graph, profile, sizes, cluster, choice, home, lowering, selective=not later))
            possible.append(choice)
        except PlanError as error:
            refusals.append(error)
    if not made:
        raise refusals[0]
    best = made[0] if len(made) == 1 else fastest(made)
    if later:  # for one schedule only, as a plan is lowered once more for it
        best = draft(graph, profile, sizes, cluster, possible[made.index(best)], home, lowering)
    steps = graph.loss is not None or options.ranks
    files = emitted(best.program, best.schedule, best.plan, profile, best.whole, steps, False, best.kept, best.memory)
    lines = chosen_lines(options, graph, best.plan, best.schedule, len(made), best.memory, best.kept)
    return replace(best, files={**files, "plan.json": plan_file.dump(best.plan, graph)}, chosen=lines)


def emitted(
    program: Program,
    schedule: Schedule,
    plan: Plan,
    profile: Profile,
    whole: WholeBatch,
    as_steps: bool,
    by_device: bool = False,
    kept: Sequence[KeptBytes | None] = (),
    memory: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, str]:
    """The files of the package, one for each stage, or with `by_device` for each device. `as_steps`: the scheduler
    follows the rows of a schedule, for training or not. `kept`, `memory`: as in `Build`."""
    with timed("codegen"):
        known = kept or [None] * len(plan.stages)
        notes = [
            note(profile, stage, exact, (memory or {}).get(stage.device))
            for stage, exact in zip(plan.stages, known, strict=True)
        ]
        if as_steps:
            scheduler = emit_steps(program, schedule, plan, whole)
        else:
            scheduler = emit_scheduler(program, plan.chunks, whole)
        return package(program, plan, scheduler, notes, whole, by_device, schedule)


def draft(
    graph: Graph,
    profile: Profile,
    sizes: Mapping[str, int],
    cluster: Cluster,
    options: Options,
    home: Placement | None,
    lowering: Lowering,
    selective: bool = True,
) -> Build:
    """The build without its files, with `memory_limit` the fastest within it. `selective`: whether stages may recompute
    what is cheap alone where there is no limit; the others as of `build`."""
    samples = lowering.samples
    if samples is not None and graph.mixed:
        mixed = graph.mixed[0]
        raise PlanError(
            f"{mixed.origin}\n{mixed.what}: replicas have slices of the micro-batches, and would do that with fewer "
            "samples than a call of the pipe does; leave out replicas, or choose a plan without"
        )
    with timed("planning"):
        uncut = [] if samples is None else [op.name for op in graph.ops if op.name not in samples]
        plans = _plans(graph, profile, cluster, options, home, uncut)
    made: list[Build] = []
    refused: list[NothingFits] = []
    for decided in plans:
        try:
            made.append(_drafted(graph, profile, sizes, cluster, options, decided, lowering, selective))
        except NothingFits as error:
            refused.append(error)
    if not made:
        nearest = min(refused, key=lambda error: max(error.least.values()))
        raise PlanError(too_small(nearest.least, options, str(nearest)))
    return min(made, key=lambda one: one.timeline.makespan)


def _plans(
    graph: Graph, profile: Profile, cluster: Cluster, options: Options, home: Placement | None, uncut: Sequence[str]
) -> list[Plan]:
    """The plan; with `memory_limit` several, with all that can be recomputed: where the best cuts are depends on
    what is recomputed, so those of each mode are tried."""
    if options.memory_limit is None:
        return [decide(graph, profile, cluster, options, home, uncut)]
    found: dict[tuple[StagePlan, ...], Plan] = {}
    refusals: list[PlanError] = []
    for mode in WHOLE_MODES:
        try:
            decided = decide(graph, profile, cluster, replace(options, checkpoint=mode), home, uncut)
        except PlanError as error:
            refusals.append(error)
            continue
        stages = tuple(replace(stage, checkpoint="always") for stage in decided.stages)
        found.setdefault(stages, replace(decided, stages=stages))
    if not found:
        raise refusals[0]
    return list(found.values())


def _drafted(
    graph: Graph,
    profile: Profile,
    sizes: Mapping[str, int],
    cluster: Cluster,
    options: Options,
    decided: Plan,
    lowering: Lowering,
    selective: bool,
) -> Build:
    """The build of a plan, without its files. Raises NothingFits if nothing stays within `memory_limit`."""

    with timed("passes"):
        made = lowering(decided)
        program = made.program
        if graph.trains_epilogue and program.stages[program.epilogue_stage].replicas:
            refuse_epilogue(graph, "and replicas of the last stage have slices of it: leave these out")
        _tell_of_slices(program)
        whole = on_whole_batch(graph, program)
    with timed("simulator"):
        trains = graph.loss is not None
        labels = tuple(dict.fromkeys(program.devices))

        def costs_of(one: Lowered, copies: int = 2) -> tuple[StageCost, ...]:
            runs, taken = one.plan if trains else without_replicas(one.plan), taken_bytes(one.program, sizes)
            return stage_costs(runs, profile, taken, copies, keeps_at_once=trains, kept=one.kept, program=one.program)

        runs = decided if trains else without_replicas(decided)
        between, sums = hops(program, sizes, cluster, profile.batch), reductions(runs, profile, cluster)
        schedule = schedule_of(program, decided.chunks, options, fitting(decided, costs_of(made), cluster))
        check_write_order(schedule, program)
        room = memory_limits(runs, cluster, options)
        copies = parameter_copies(runs, options)

        def merged(costs: Sequence[StageCost]) -> Schedule:
            return merge_backward_halves(schedule, costs, between) if options.schedule in SCHEDULES else schedule

        def peaks(one: Lowered) -> dict[str, int]:
            return dict(zip(labels, simulate(schedule, costs_of(one, copies), between, labels).high_water, strict=True))

        partly = lowering if lowering.is_coded else None
        if room:
            try:
                made = chosen(
                    made,
                    lambda one: costs_of(one, copies),
                    lambda ways: auto_checkpoint(schedule, ways, room, labels, between, sums),
                    partly,
                    lambda one: check_memory(peaks(one), room),
                )
            except NothingFits:
                if trains or graph.training:
                    raise
                made = made.recomputing(["always"] * len(program.stages))  # without gradients evaluation keeps nothing
        elif options.saves_only:
            made = where_it_saves(made, costs_of, merged, labels, partly if selective else None)
        decided, program = made.plan, made.program
        costs = costs_of(made)

        def in_memory(one: Schedule) -> bool:
            return not room or fits(simulate(one, costs_of(made, copies), between, labels), room)

        schedule = joined if in_memory(joined := merged(costs)) else schedule
        pairs: tuple[str, ...] = ()
        if options.overlap_pairs and graph.trains_epilogue:
            pairs = ("overlapped pairs: none; the loss needs the whole batch, so all forwards come first",)
        elif options.overlap_pairs and trains:
            alone = [stage.index for stage in program.stages if stage.backward is None]
            schedule, pairs = overlapped(
                schedule, alone, lambda one: simulate(one, costs, between, labels).makespan, in_memory
            )
        line = replace(simulate(schedule, costs, between, labels, sums), counts=WITH_PARAMETERS)
        timeline = spread(line, replica_groups(runs))
        memory = {label: (need, room[label]) for label, need in peaks(made).items()} if room else {}
    return Build(
        graph, sizes, cluster, profile, decided, schedule, program, made.trail, lambda: timeline, {}, whole,
        kept=made.kept, memory=memory, pairs=pairs,
    )  # fmt: skip


def _tell_of_slices(program: Program) -> None:
    """Warn of submodules kept whole that get slices of micro-batches: they may look at all samples."""
    for stage in program.stages:
        kept = next((op.target for op in stage.ops if isinstance(op.target, Opaque)), None)
        if stage.replicas and kept is not None:
            warn(
                f"{kept} is kept whole, {kept.because}, and each replica of stage {stage.index} calls it with a slice "
                "of the micro-batch: if it looks at several samples at once (an if over the batch, a norm), results "
                "differ from those without replicas; then leave out the replicas of this stage",
                MixedSamplesWarning,
            )


def predict(made: Build, chunks: int, times: Times | None = None) -> Timeline:
    """The predicted timeline of a timed step of `chunks` micro-batches, from the profile, or from the `times` of its
    actions and of what surrounds them. Memory is counted as in a timed step: on a GPU all of it, on a CPU worker only
    what backward needs."""
    program, sizes, schedule = made.program, made.sizes, only(replace(made.schedule, pairs=frozenset()), chunks)
    labels = tuple(dict.fromkeys(program.devices))
    copies, counts = (0, KEPT) if all(label.startswith("cpu") for label in labels) else (2, WITH_PARAMETERS)
    taken = taken_bytes(program, sizes)
    costs = stage_costs(made.plan, made.profile, taken, copies, True, made.kept, program)
    cluster = made.cluster if times is None else replace(made.cluster, links=times.links, switches=())
    between = hops(program, sizes, cluster, made.profile.batch)
    if times is None:
        found = simulate(schedule, costs, between, labels, reductions(made.plan, made.profile, cluster))
        return spread(replace(found, counts=counts), replica_groups(made.plan))
    found = simulate(schedule, costs, between, labels, took=times.actions)
    spans = tuple(times.computing(span) if span.where in labels else span for span in found.spans)
    return replace(found, spans=spans, call=(-times.before, found.makespan + times.after), counts=counts)


def rehearsed(made: Build, chunks: int, rounds: Sequence[Times]) -> Timeline:
    """The median, by makespan, of the predicted timelines with the times of these rounds."""
    timelines = sorted((predict(made, chunks, times) for times in rounds), key=lambda one: one.makespan)
    return timelines[(len(timelines) - 1) // 2]


def fastest(drafts: Sequence[Build]) -> Build:
    """The build with the shortest step that fits into memory. Raises PlanError if none fits."""
    memory = {device.label: device.memory for device in drafts[0].cluster.devices}
    try:
        chosen, _ = auto([(made.schedule, made.timeline) for made in drafts], memory)
    except ValueError as error:
        raise PlanError(str(error)) from None
    return next(made for made in drafts if made.schedule is chosen)


def on_whole_batch(graph: Graph, program: Program) -> WholeBatch:
    """What runs on the whole batch: totals on the device of the last stage, where the loss is."""

    def lowered(part: Graph | None, device: str) -> Program | None:
        if part is None:
            return None
        stage = StagePlan(tuple(op.name for op in part.ops), device, "never")
        return lower(part, Plan(part.model, (stage,), 1))

    end = program.devices[program.epilogue_stage]
    return WholeBatch(lowered(graph.totals, program.devices[-1]), lowered(graph.epilogue, end))


def decide(
    graph: Graph, profile: Profile, cluster: Cluster, options: Options, home: Placement | None, uncut: Sequence[str]
) -> Plan:
    """The given plan, the one that follows the first build's, or a new one. `uncut` are the values that cannot move
    between stages with different numbers of replicas. Raises PlanError if the given plan does not fit the graph."""
    if home is not None:
        return home.plan_of(graph) or plan_like(graph, home.stages, home.plan, profile, cluster, uncut)
    if options.plan is not None:
        try:
            given = placed(options.plan, graph) if isinstance(options.plan, PlanFile) else options.plan
            given = with_loss(graph, given)
            plans.check(given, [op.name for op in graph.ops])
        except ValueError as error:
            raise PlanError(str(error)) from None
        return given
    decided = plan(
        graph,
        profile,
        cluster,
        devices=options.devices,
        chunks=options.chunks,
        checkpoint="except_last" if options.checkpoint == AUTO else options.checkpoint,
        cut=options.cut,
        schedule=schedule_text(options),
        deferred_batch_norm=bool(options.deferred_batch_norm),
        replicas=options.replicas,
        uncut=uncut,
    )
    stages = enumerate(decided.stages)
    return replace(decided, stages=tuple(replace(stage, offload=s in options.offload) for s, stage in stages))
