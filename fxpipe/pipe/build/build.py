"""The whole build: from a captured graph to generated files that run, as functions between immutable values.

Graph ─profile─▶ Profile ─plan─▶ Plan ─gpipe─▶ Schedule ─simulate─▶ Timeline
  └───────────lower───────────────┴─▶ Program ─emit─▶ files ─load─▶ package
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpipe.capture import sample_dims
from fxpipe.codegen.package.package_files import package
from fxpipe.codegen.scheduler.forward_scheduler import emit_scheduler
from fxpipe.codegen.scheduler.step_scheduler import emit_steps
from fxpipe.codegen.stage.stage_note import note
from fxpipe.errors import MixedSamplesWarning, PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import Opaque, opaques
from fxpipe.ir.operators.operators import Operator
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Config
from fxpipe.ir.plan import plan as plans
from fxpipe.ir.plan import plan_file
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.plan_file import PlanFile, placed
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.program.kept_bytes import KeptBytes, kept_bytes
from fxpipe.ir.program.program import Program
from fxpipe.ir.schedule.action_times import Times
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.schedule.sub_schedule import only, share
from fxpipe.ir.timeline import Timeline
from fxpipe.passes import PASSES, Pass, lower
from fxpipe.pipe.options.compile_options import Options, candidates, make_schedule
from fxpipe.pipe.options.user_passes import checked
from fxpipe.pipe.saved.model_fingerprint import Fingerprint
from fxpipe.planning import plan, plan_like, with_loss
from fxpipe.planning.stages.plan_stages import inner_cuts
from fxpipe.profiling import on_kinds
from fxpipe.schedules.auto_schedule import auto
from fxpipe.schedules.make_schedule import AUTO, SCHEDULES, make
from fxpipe.schedules.one_f_one_b import gpipe
from fxpipe.schedules.simulate.action_costs import hops, stage_costs, taken_bytes, timed_hops
from fxpipe.schedules.simulate.merge_backward_halves import merge_backward_halves
from fxpipe.schedules.simulate.replica_costs import reductions, spread
from fxpipe.schedules.simulate.simulate import StageCost, simulate

from .batch_statistics import BatchNorm, batch_norms
from .phase_timing import timed
from .state_write_order import check_write_order


@dataclass(frozen=True)
class Placement:
    """What the first build of a pipe decides for the later ones: its plan, and the stage of each parameter and buffer,
    by its path."""

    plan: Plan
    stages: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Build:
    """Everything made for one kind of call; builds are compared by identity.

    - `sizes`: the symbolic sizes of the micro-batch that profile and timeline are for.
    - `trail`: the program after each pass that changed it, by the pass's name; with a strategy, the placed graph first.
    - `files`: the generated package.
    - `totals`: the program that runs on the whole batch before it is cut.
    - `cuts`: how a strategy cuts each operator.
    - `source`: the fingerprint of the model that was captured.
    - `kept`: what each stage keeps of a micro-batch, where its backward is code.
    """

    graph: Graph
    sizes: Mapping[str, int]
    cluster: Cluster
    profile: Profile
    plan: Plan
    schedule: Schedule
    program: Program
    trail: Mapping[str, Program | Placed]
    timeline: Timeline
    files: Mapping[str, str]
    totals: Program | None = None
    cuts: tuple[tuple[Operator, Config], ...] = ()
    source: Fingerprint | None = None
    kept: tuple[KeptBytes | None, ...] = ()

    @cached_property
    def batch_norms(self) -> tuple[BatchNorm, ...]:
        """The norms that use the statistics of their batch."""
        return batch_norms(self.graph)


SMALLER = "move these lines into the forward of a smaller submodule, and the rest is cut"


def build(
    graph: Graph, profile: Profile, sizes: Mapping[str, int], cluster: Cluster, options: Options, home: Placement | None
) -> Build:
    """The build for a graph and its profile. With a `home`, ops go to the stages of their parameters. If several
    schedules may be used, the fastest is taken; schedules that are not possible (a small model may have too few ops for
    several stages on each device) are left out. Raises the first PlanError if none is possible. The profile gets the
    times on the cluster's other kinds of devices; it is for its own device, or if that is not in the cluster, for the
    first one of the pipe."""
    with timed("profiling"):
        profile = on_kinds(graph, sizes, profile, cluster, options.devices[0])
    made: list[Build] = []
    refusals: list[PlanError] = []
    for choice in choices(graph, options, home):
        try:
            made.append(draft(graph, profile, sizes, cluster, choice, home))
        except PlanError as error:
            refusals.append(error)
    if not made:
        raise refusals[0]
    best = made[0] if len(made) == 1 else fastest(made)
    as_steps = graph.loss is not None or options.ranks
    files = emitted(best.program, best.schedule, best.plan, profile, best.totals, as_steps, kept=best.kept)
    return replace(best, files={**files, "plan.json": plan_file.dump(best.plan, graph)})


def emitted(
    program: Program,
    schedule: Schedule,
    plan: Plan,
    profile: Profile,
    totals: Program | None,
    as_steps: bool,
    by_device: bool = False,
    kept: Sequence[KeptBytes | None] = (),
) -> dict[str, str]:
    """The files of the package, one for each stage, or with `by_device` for each device. `as_steps`: the scheduler
    follows the rows of a schedule, for training or not. `kept`: as in `Build`."""
    with timed("codegen"):
        known = kept or [None] * len(plan.stages)
        notes = [note(profile, stage, exact) for stage, exact in zip(plan.stages, known, strict=True)]
        if as_steps:
            scheduler = emit_steps(program, schedule, plan, totals)
        else:
            scheduler = emit_scheduler(program, plan.chunks, totals=totals)
        kinds = {action.kind for action in schedule.place}
        return package(program, plan, scheduler, notes, totals, by_device, kinds)


def choices(graph: Graph, options: Options, home: Placement | None) -> list[Options]:
    """The options to try: one for each schedule that the stages allow, if the schedule is "auto". A model that is kept
    whole gets one stage."""
    if options.plan is None and options.place is None and (whole := _whole_model(graph)) is not None:
        return [_on_one_device(options, whole)]
    if home is None and _may_have_fewer_stages(options):
        options = _on_as_many_as_can_be(options, graph)
    if options.schedule != AUTO:
        return [options]
    if graph.loss is None:
        return [replace(options, schedule="gpipe")]
    dealt = None if home is None else tuple(stage.device for stage in home.plan.stages)
    return [replace(options, schedule=name, devices=devices) for name, devices in candidates(options.devices, dealt)]


def _whole_model(graph: Graph) -> Opaque | None:
    """The submodule that is kept whole if it is the model itself, or if no cut separates any op from it; else None."""
    kept = opaques(graph)
    together = bool(kept) and not inner_cuts(graph)
    return next((opaque for opaque in kept if together or not opaque.path), None)


def _on_one_device(options: Options, whole: Opaque) -> Options:
    """The options for one stage, on the first device. Raises PlanError over ranks, where each rank needs a stage."""
    if options.ranks:
        raise PlanError(
            f"{whole.origin}\n{whole.reason}: {whole} is kept whole, as one op, and each rank is to have a stage; move "
            "these lines into the forward of a submodule"
        )
    if whole.path and len(options.devices) > 1:  # for the model itself, capture has warned already
        warnings.warn(
            f"nothing is pipelined: {whole} is kept whole, {whole.because}, and no cut "
            f"leaves anything beside it; {SMALLER}",
            stacklevel=2,
        )
    first = options.devices[0]
    mode = options.checkpoint
    if not isinstance(mode, str):
        mode = "except_last" if mode else "never"
    return replace(
        options, devices=(first,), schedule="gpipe", warmup=None, checkpoint=mode, offload=frozenset(), balance="time",
        split_at=(), replicas={first: ()},
    )  # fmt: skip


def _may_have_fewer_stages(options: Options) -> bool:
    """Whether no option but the number of devices depends on the number of stages."""
    said = options.ranks or options.warmup or options.offload or options.split_at or options.plan or options.place
    names = (options.schedule, options.checkpoint, options.balance)
    return not said and options.schedule in ("gpipe", "1f1b", AUTO) and all(isinstance(name, str) for name in names)


def _on_as_many_as_can_be(options: Options, graph: Graph) -> Options:
    """The options with only the first devices, if submodules that are kept whole do not allow a stage for each."""
    kept, most = opaques(graph), 1 + len(inner_cuts(graph))
    if not kept or most >= len(options.devices):
        return options
    why = "; ".join(f"{opaque} is kept whole, {opaque.because}" for opaque in kept)
    warnings.warn(f"{most} of {len(options.devices)} devices have a stage: {why}; {SMALLER}", stacklevel=2)
    devices = options.devices[:most]
    replicas = {device: others for device, others in options.replicas.items() if device in devices}
    return replace(options, devices=devices, replicas=replicas)


def draft(
    graph: Graph, profile: Profile, sizes: Mapping[str, int], cluster: Cluster, options: Options, home: Placement | None
) -> Build:
    """The build without its files."""
    samples = sample_dims(graph) if graph.loss is not None and any(options.replicas.values()) else None
    if samples is not None and graph.mixed:
        mixed = graph.mixed[0]
        raise PlanError(
            f"{mixed.origin}\n{mixed.what}: replicas have slices of the micro-batches, and would do that with fewer "
            "samples than a call of the pipe does; leave out replicas, or choose a plan without"
        )
    with timed("planning"):
        uncut = [] if samples is None else [op.name for op in graph.ops if op.name not in samples]
        decided = decide(graph, profile, cluster, options, home, uncut)
    trail: dict[str, Program | Placed] = {}
    with timed("passes"):
        chosen = passes_of(options)
        program = lower(graph, decided, trail.__setitem__, chosen, samples, backward=options.backward)
        _tell_of_slices(program)
        totals = lowered_totals(graph, decided)
    with timed("simulator"):
        runs = decided if graph.loss is not None else without_replicas(decided)
        taken, at_once = taken_bytes(program, sizes), graph.loss is not None
        kept = kept_bytes(program, sizes, not options.ranks)
        costs = stage_costs(runs, profile, taken, keeps_at_once=at_once, kept=kept)
        between, sums = hops(program, sizes, cluster, profile.batch), reductions(runs, profile, cluster)
        schedule = schedule_of(program, decided, options, fitting(decided, costs, cluster))
        check_write_order(schedule, program)
        forwards = all(action.kind == "F" for action in schedule.place)
        if options.schedule in SCHEDULES and not forwards:  # not one that the user wrote
            schedule = merge_backward_halves(schedule, costs, between)
        labels = tuple(dict.fromkeys(program.devices))
        timeline = spread(simulate(schedule, costs, between, labels, sums), replica_groups(runs))
    return Build(graph, sizes, cluster, profile, decided, schedule, program, trail, timeline, {}, totals, kept=kept)


def passes_of(options: Options) -> tuple[Pass, ...]:
    """fxpipe's passes, and after them the user's; only the gradients are written out later, as they are those of what
    the user's passes have made. Raises PlanError if two have one name."""
    names = [run.__name__ for run in PASSES]
    for name in (getattr(run, "__name__", type(run).__name__) for run in options.passes):
        if name in names:
            raise PlanError(
                f"passes: there is another pass of the name {name!r}, by which pipe.trail shows it; rename it"
            )
        names.append(name)
    *others, gradients = PASSES
    return (*others, *map(checked, options.passes), gradients)


def _tell_of_slices(program: Program) -> None:
    """Warn of submodules kept whole that get slices of micro-batches: they may look at all samples."""
    for stage in program.stages:
        kept = next((op.target for op in stage.ops if isinstance(op.target, Opaque)), None)
        if stage.replicas and kept is not None:
            warnings.warn(
                f"{kept} is kept whole, {kept.because}, and each replica of stage {stage.index} calls it with a slice "
                "of the micro-batch: if it looks at several samples at once (an if over the batch, a norm), results "
                "differ from those without replicas; then leave out the replicas of this stage",
                MixedSamplesWarning,
                stacklevel=2,
            )


def replica_groups(plan: Plan) -> dict[str, tuple[str, ...]]:
    """All devices of each stage, by the stage's first device."""
    return {stage.device: stage.devices for stage in plan.stages}


def without_replicas(plan: Plan) -> Plan:
    """The plan as calls of the pipe run it: on the first device of each stage."""
    return replace(plan, stages=tuple(replace(stage, replicas=()) for stage in plan.stages))


def predict(made: Build, chunks: int, times: Times | None = None) -> Timeline:
    """The predicted timeline of a timed step of `chunks` micro-batches, from the profile, or from the `times` of its
    actions. Memory is counted as in a timed step: on a GPU all of it, on a CPU worker only what backward needs."""
    program, sizes, schedule = made.program, made.sizes, only(made.schedule, chunks)
    labels = tuple(dict.fromkeys(program.devices))
    copies = 0 if all(label.startswith("cpu") for label in labels) else 2
    taken = taken_bytes(program, sizes)
    costs = stage_costs(made.plan, made.profile, taken, copies, keeps_at_once=True, kept=made.kept)
    if times is None:
        sums = reductions(made.plan, made.profile, made.cluster)
        return spread(
            simulate(schedule, costs, hops(program, sizes, made.cluster, made.profile.batch), labels, sums),
            replica_groups(made.plan),
        )
    return simulate(schedule, costs, timed_hops(program, times), labels, took=times.actions)


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


def schedule_of(program: Program, plan: Plan, options: Options, limit: int) -> Schedule:
    """The schedule of a step; calls of the pipe run GPipe's, over ranks only its forwards. `limit` is how many
    micro-batches fit into memory."""
    if program.graph.loss is None and options.ranks:
        return make("forward-only", program.devices, plan.chunks)
    if program.graph.loss is None:
        return share(gpipe(len(program.stages), plan.chunks), program.devices)
    return make_schedule(options, program.devices, plan.chunks, limit)


def fitting(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> int:
    """How many micro-batches fit into the memory of every device at once, at least 1: D of DAPPLE, section V."""
    fixed: dict[str, int] = {}
    for stage, cost in zip(plan.stages, costs, strict=True):
        again = 0 if stage.checkpoint == "never" else cost.saved
        fixed[stage.device] = fixed.get(stage.device, 0) + cost.fixed + again
    fits = [plan.chunks]
    for stage, cost in zip(plan.stages, costs, strict=True):
        each = cost.saved if stage.checkpoint == "never" else cost.taken
        room = min(cluster.device(label).memory for label in stage.devices) - fixed[stage.device]
        fits += [room // each] if each else []
    return max(1, min(fits))


def lowered_totals(graph: Graph, plan: Plan) -> Program | None:
    """The program of the graph's totals, or None: one stage, on the device of the last stage, where the loss is."""
    totals = graph.totals
    if totals is None:
        return None
    stage = StagePlan(tuple(op.name for op in totals.ops), plan.stages[-1].device, "never")
    return lower(totals, Plan(totals.model, (stage,), 1))


def schedule_text(options: Options) -> str:
    """The schedule as the plan states it: its name, or the whole schedule if it is the user's or has a `warmup`."""
    if isinstance(options.schedule, str) and options.warmup is None:
        return options.schedule
    return str(make_schedule(options, options.devices, options.chunks))


def decide(
    graph: Graph, profile: Profile, cluster: Cluster, options: Options, home: Placement | None, uncut: Sequence[str]
) -> Plan:
    """The given plan, the one that follows the first build's, or a new one. `uncut` are the values that cannot move
    between stages with different numbers of replicas. Raises PlanError if the given plan does not fit the graph."""
    if home is not None:
        return plan_like(graph, home.stages, home.plan, profile, cluster, uncut)
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
        checkpoint=options.checkpoint,
        balance=options.balance,
        split_at=options.split_at,
        schedule=schedule_text(options),
        deferred_batch_norm=bool(options.deferred_batch_norm),
        replicas=options.replicas,
        uncut=uncut,
    )
    stages = enumerate(decided.stages)
    return replace(decided, stages=tuple(replace(stage, offload=s in options.offload) for s, stage in stages))
