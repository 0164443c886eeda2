"""The memory that each device may use. What stages recompute is chosen so that a step stays within it."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.timeline import Timeline
from fxpipe.planning.stages.cut_costs import PARAMETER_COPIES

from .compile_options import Options


def memory_limits(plan: Plan, cluster: Cluster, options: Options) -> dict[str, int]:
    """The bytes that the devices of a stage may use, by its first device; empty without `memory_limit`."""
    limit = options.memory_limit
    if limit is None:
        return {}
    room = {stage.device: min(cluster.device(label).memory for label in stage.devices) for stage in plan.stages}
    return dict.fromkeys(room, limit) if isinstance(limit, int) else room


def parameter_copies(plan: Plan, options: Options) -> int:
    """How many times the bytes of parameters count towards the limit. On CPU workers with a limit in bytes: 0, as that
    is a limit for what is kept for backward alone."""
    workers = all(stage.device.startswith("cpu") for stage in plan.stages)
    return 0 if workers and isinstance(options.memory_limit, int) else PARAMETER_COPIES


def fits(timeline: Timeline, memory: Mapping[str, int]) -> bool:
    """Whether every device stays within its memory."""
    return all(peak <= memory[label] for label, peak in zip(timeline.devices, timeline.high_water, strict=True))


def too_small(least: Mapping[str, int], options: Options, why: str) -> str:
    """The message where nothing stays within memory. `least`: the bytes that each device needs at least; `why`: which
    devices lack memory."""
    need = max(least.values())
    limit = options.memory_limit
    told = f"memory_limit is {limit:,}" if isinstance(limit, int) else "the model does not fit"
    raised = f"write memory_limit={need} or more" if isinstance(limit, int) else "use more devices"
    return f"{told}: whatever is recomputed, {why}; {raised}, or more chunks, or a smaller batch"
