"""The memory within which checkpoint="auto" chooses what is recomputed."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.timeline import Timeline
from fxpipe.planning.stages.cut_costs import PARAMETER_COPIES
from fxpipe.schedules.make_schedule import AUTO

from .compile_options import Options


def memory_limits(plan: Plan, cluster: Cluster, options: Options) -> dict[str, int]:
    """With checkpoint="auto", the bytes that the devices of a stage may use, by its first device."""
    if options.checkpoint != AUTO:
        return {}
    limit = options.memory_limit
    room = {stage.device: min(cluster.device(label).memory for label in stage.devices) for stage in plan.stages}
    return room if limit is None else dict.fromkeys(room, limit)


def parameter_copies(plan: Plan, options: Options) -> int:
    """How often parameters count in the memory that is limited: never on CPU workers with `memory_limit`, which is of
    what backward keeps."""
    workers = all(stage.device.startswith("cpu") for stage in plan.stages)
    return 0 if workers and options.memory_limit is not None else PARAMETER_COPIES


def fits(timeline: Timeline, memory: Mapping[str, int]) -> bool:
    """Whether every device stays within its memory."""
    return all(peak <= memory[label] for label, peak in zip(timeline.devices, timeline.high_water, strict=True))


def too_small(least: Mapping[str, int], options: Options, why: str) -> str:
    """The message where nothing stays within memory. `least`: the bytes that each device needs at least; `why`: which
    devices lack memory."""
    need = max(least.values())
    limit = (
        f"memory_limit is {options.memory_limit:,}" if options.memory_limit is not None else "the model does not fit"
    )
    raised = f"write memory_limit={need} or more" if options.memory_limit is not None else "use more devices"
    return f"{limit}: whatever is recomputed, {why}; {raised}, or more chunks, or a smaller batch"
