"""The street, whole: from a captured graph to generated files that run. Plain functions between frozen values.

Graph ─profile─▶ Profile ─plan─▶ Plan ─gpipe─▶ Schedule ─simulate─▶ Timeline
  └───────────lower───────────────┴─▶ Program ─emit─▶ files ─load─▶ package
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .clock import timed
from .codegen.package import package
from .codegen.scheduler import emit_scheduler
from .codegen.steps import emit_steps
from .errors import PlanError
from .ir import plan as plans
from .ir.cluster import Cluster
from .ir.graph import Graph
from .ir.plan import Plan, StagePlan
from .ir.profile import Profile, total
from .ir.program import Program
from .ir.schedule import Schedule, share
from .ir.timeline import Timeline
from .ir.units import show_bytes, show_seconds
from .options import Options, make_schedule
from .passes import lower
from .planning import plan, plan_like
from .schedules.one_f_one_b import gpipe
from .simulator.costs import hops, stage_costs, taken_bytes
from .simulator.simulate import simulate


@dataclass(frozen=True)
class Home:
    """What the first build of a pipe decides for the later ones: its plan, and the stage where each parameter and
    buffer lives, by its path."""

    plan: Plan
    stages: Mapping[str, int]


@dataclass(frozen=True)
class Build:
    """Everything made for one kind of call. `trail` has the program after each pass that changed it, by the pass's
    name; `sizes` the numbers of the micro-batch that profile and timeline speak of; `files` the generated package;
    `totals` what runs before the batch is cut."""

    graph: Graph
    sizes: Mapping[str, int]
    cluster: Cluster
    profile: Profile
    plan: Plan
    schedule: Schedule
    program: Program
    trail: Mapping[str, Program]
    timeline: Timeline
    files: Mapping[str, str]
    totals: Program | None = None


def build(
    graph: Graph, profile: Profile, sizes: Mapping[str, int], cluster: Cluster, options: Options, home: Home | None
) -> Build:
    """All the values from a graph and its profile on. With a `home`, ops go where their parameters live."""
    with timed("planning"):
        decided = decide(graph, profile, cluster, options, home)
    trail: dict[str, Program] = {}
    with timed("passes"):
        program = lower(graph, decided, watch=trail.__setitem__)
        totals = None if graph.totals is None else lower(graph.totals, whole_plan(graph.totals, decided))
    with timed("simulator"):
        schedule = schedule_of(program, decided, options)
        costs = stage_costs(decided, profile, taken_bytes(program, sizes))
        timeline = simulate(schedule, costs, hops(program, sizes, cluster), tuple(dict.fromkeys(program.devices)))
    with timed("codegen"):
        notes = [note(profile, stage.ops) for stage in decided.stages]
        emitted = (
            emit_scheduler(program, decided.chunks)
            if graph.loss is None
            else emit_steps(program, schedule, decided, totals)
        )
        files = package(program, decided, emitted, notes, totals)
    return Build(graph, sizes, cluster, profile, decided, schedule, program, trail, timeline, files, totals)


def schedule_of(program: Program, plan: Plan, options: Options) -> Schedule:
    """The order of a step; what forward() alone runs is GPipe's."""
    if program.graph.loss is None:
        return share(gpipe(len(program.stages), plan.chunks), program.devices)
    return make_schedule(options, program.devices, plan.chunks)


def whole_plan(totals: Graph, plan: Plan) -> Plan:
    """All in one stage, on the device where the pipeline ends, for that is where the loss is."""
    stage = StagePlan(tuple(op.name for op in totals.ops), plan.stages[-1].device, "never")
    return Plan(totals.model, (stage,), 1)


def schedule_text(options: Options) -> str:
    """The schedule for the plan: its name, or all of it."""
    if isinstance(options.schedule, str) and options.warmup is None:
        return options.schedule
    return str(make_schedule(options, options.devices, options.chunks))


def note(profile: Profile, ops: Sequence[str]) -> str:
    """What the ops of a stage cost, for the header of its file."""
    names = set(ops)
    cost = total([cost for cost in profile.ops if cost.name in names])
    facts = (
        f"forward {show_seconds(cost.forward)}, backward {show_seconds(cost.backward)}, keeps {show_bytes(cost.saved)}"
    )
    return f"{facts} ({profile.source}, b = {profile.batch})"


def decide(graph: Graph, profile: Profile, cluster: Cluster, options: Options, home: Home | None) -> Plan:
    """The plan that was given, the one that follows the first build's, or a new one."""
    if home is not None:
        return plan_like(graph, home.stages, home.plan, profile, cluster)
    if options.plan is not None:
        try:
            plans.check(options.plan, [op.name for op in graph.ops])
        except ValueError as error:
            raise PlanError(str(error)) from None
        return options.plan
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
        deferred_batch_norm=options.deferred_batch_norm,
    )
    stages = enumerate(decided.stages)
    return replace(decided, stages=tuple(replace(stage, offload=s in options.offload) for s, stage in stages))
