"""The predicted timeline of a step beside the measured one, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fxpipe.engines.local.memory_dry_run import memory_of_step
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.ir.graph.graph import Graph, is_opaque, op_name
from fxpipe.ir.graph.ops import RECURRENT
from fxpipe.ir.plan import plan_file
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.schedule.sub_schedule import only
from fxpipe.ir.timeline import Timeline, compare, with_memory_of
from fxpipe.pipe.build.build import Build, draft, predict
from fxpipe.pipe.build.build_cache import BuildCache
from fxpipe.pipe.build.lowering import Lowering
from fxpipe.pipe.options.compile_options import Options
from fxpipe.schedules.diagnosis.measured_profile import measured_profile
from fxpipe.schedules.diagnosis.time_split import split
from fxpipe.schedules.make_schedule import AUTO

from .comparison import Comparison
from .diagnosis import Diagnosis
from .replanned import Replanned


@dataclass(frozen=True)
class Timed:
    """A step with a timeline. `inputs`: on the meta device."""

    made: Build
    timeline: Timeline
    inputs: Sequence[Any]

    @property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return chunks_of(self.timeline)


Rehearsed = tuple[Build, Timeline] | None
DRY_RUN = "memory is predicted by a run of this step on meta tensors, which computes nothing"


def beside_predicted(cache: BuildCache, timed: Timed, rehearsed: Rehearsed) -> Comparison:
    """What `Pipe.compare` returns: the rehearsed timeline, if it is for the same build and chunks, else the predicted
    one, beside the measured one."""
    predicted, note = _of_same_step(timed, rehearsed), "memory is predicted by the step that rehearse ran"
    if predicted is None:
        predicted, note = with_memory(predict(timed.made, timed.chunks), cache, timed)
    table = f"{compare(predicted, timed.timeline)}\n{note}"
    return Comparison(table, (("predicted", predicted), ("measured", timed.timeline)))


def diagnosed(timed: Timed, rehearsed: Rehearsed, options: Options) -> Diagnosis:
    """Where the time of a step went, beside the rehearsed timeline, if it is for the same step, else the predicted."""
    made, chunks = timed.made, timed.chunks
    schedule = replace(only(made.schedule, chunks), sources=made.program.sources)
    predicted = _of_same_step(timed, rehearsed) or predict(made, chunks)
    measured = split(timed.timeline, schedule, predicted)
    again = partial(replanned, timed, options)
    return Diagnosis(made.plan, schedule.name, chunks, measured, split(predicted, schedule), timed.timeline, again)


def replanned(timed: Timed, options: Options) -> Replanned:
    """The fastest cut with the times of a step, see `Diagnosis.replan`."""
    if options.place is not None:
        raise PlanError(
            "replan moves cuts between stages, and this pipe has a strategy, which places each op: search again, with "
            "fxpipe.search"
        )
    made, line = timed.made, timed.timeline
    profile = measured_profile(made.profile, made.plan, line)
    now = replace(made, profile=profile)
    asked = like(made.plan, options)
    lowering = Lowering(made.graph, asked, made.sizes, {})
    found = draft(made.graph, profile, made.sizes, made.cluster, asked, None, lowering)
    before, seconds = (predict(one, timed.chunks).makespan for one in (now, found))
    best = found if seconds < before else now
    plan = replace(best.plan, optimizer_sharding=made.plan.optimizer_sharding)
    text = plan_file.dump(plan, made.graph)
    return Replanned(plan, min(seconds, before), before, line.makespan, profile, text)


def like(plan: Plan, options: Options) -> Options:
    """Options to plan again as for `plan`, with other cuts."""
    stages = plan.stages
    return replace(
        options,
        plan=None,
        devices=tuple(stage.device for stage in stages),
        chunks=plan.chunks,
        schedule=plan.schedule,
        warmup=AUTO,
        checkpoint=AUTO if options.memory_limit is not None else tuple(stage.checkpoint for stage in stages),
        offload=frozenset(index for index, stage in enumerate(stages) if stage.offload),
        cut="time",
        replicas={stage.device: stage.replicas for stage in stages},
        deferred_batch_norm=plan.deferred_batch_norm,
    )


def _of_same_step(timed: Timed, rehearsed: Rehearsed) -> Timeline | None:
    """The rehearsed timeline, if there is one for the same build and number of micro-batches."""
    same = rehearsed is not None and rehearsed[0] is timed.made and timed.chunks == chunks_of(rehearsed[1])
    return rehearsed[1] if rehearsed is not None and same else None


def chunks_of(timeline: Timeline) -> int:
    """The number of micro-batches of a timeline."""
    return 1 + max(span.micro_batch for span in timeline.spans)


def check_rehearsal(made: Build) -> None:
    """Raise FxpipeError if steps of this build cannot be rehearsed."""
    if not all(label.startswith("cpu") for label in made.program.devices):
        raise FxpipeError("rehearse is for CPU workers; what a GPU takes is measured by profile='measure'")
    if any(stage.replicas for stage in made.plan.stages):
        raise FxpipeError("rehearse is for stages without replicas; see step(..., timeline=True)")


def with_memory(predicted: Timeline, cache: BuildCache, timed: Timed) -> tuple[Timeline, str]:
    """The timeline with the memory of CPU workers from a dry run on the meta device, or as it is, if there can be none;
    and a line that says where its memory comes from. Over ranks and on GPUs it is always that of the profile."""
    made = timed.made
    if cache.options.ranks or not all(label.startswith("cpu") for label in made.program.devices):
        return predicted, "memory is estimated from the profile"
    odd = unknown_memory(made.graph)
    if odd is None and not any(stage.replicas for stage in made.plan.stages):
        try:
            found = memory_of_step(cache.live(made).step_scheduler, timed.inputs, cache.options.chunks)
            return with_memory_of(predicted, found), DRY_RUN
        except Exception as error:  # the model reads values, and meta tensors have none
            odd = str(error).partition("\n")[0]
    return predicted, f"memory is estimated: {odd or 'stages have replicas'}"


def unknown_memory(graph: Graph) -> str | None:
    """A text that names the first op whose memory only a run can tell; None if there is no such op."""
    for op in graph.ops:
        if op_name(op) in RECURRENT or is_opaque(op):
            return f"what {op.name}, at {op.origin}, keeps is known once it runs"
    return None
