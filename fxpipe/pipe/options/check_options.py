"""Which options contradict each other, whatever the model."""

from __future__ import annotations

import torch

from fxpipe.errors import PlanError, did_you_mean
from fxpipe.ir.units import count
from fxpipe.pipe.build.compiled.device_graphs import NAME, device_graphs, refusal
from fxpipe.planning.stages.manual_cuts import begins
from fxpipe.planning.stages.plan_stages import GOALS
from fxpipe.runtime.accelerator import has_streams
from fxpipe.schedules.make_schedule import AUTO, SCHEDULES, STRAIGHT
from fxpipe.torch_internals.compiling.inductor import records_graphs

from .backward_options import autograd_because, is_coded, symbolic_sizes
from .compile_options import DEVICE_MEMORY, Options, backend_of, is_local, make_schedule


def check(options: Options) -> Options:
    """The same options. Raises PlanError if they contradict each other, whatever the model."""
    n = len(options.devices)
    if isinstance(options.checkpoint, frozenset) and not options.checkpoint <= set(range(n)):
        unknown = sorted(options.checkpoint - set(range(n)))
        raise PlanError(f"checkpoint names the stages {unknown}: there are stages 0 to {n - 1}")
    for s in sorted(options.offload):
        if not 0 <= s < n:
            raise PlanError(f"offload names stage {s}: there are stages 0 to {n - 1}")
        if not has_streams(torch.device(options.devices[s].partition(":")[0])):
            raise PlanError(
                f"offload names stage {s}, which is on {options.devices[s]}: what a stage keeps is moved from an "
                "accelerator to host memory; leave it out, or recompute with checkpoint="
            )
    if (names := begins(options.cut)) is not None and len(names) != n - 1:
        raise PlanError(
            f"cut names {count(len(names), 'module', 'modules')}, which makes {len(names) + 1} stages, but there are "
            f"{n} devices: name {count(n - 1, 'module', 'modules')}"
            + (did_you_mean(names[0], GOALS) if len(names) == 1 else "")
        )
    if options.memory_limit is not None:
        check_limit(options)
    check_backward(options)
    check_graphs(options)
    if options.place is not None:
        check_placed(options)
    elif options.schedule != AUTO:
        make_schedule(options, options.devices, options.chunks)
    return options


def check_limit(options: Options) -> None:
    """Raise PlanError for options with which recomputation cannot be chosen by memory."""
    if options.place is not None:
        raise PlanError("memory_limit chooses what stages recompute, which a strategy does not have: leave it out")
    if options.checkpoint != AUTO:
        raise PlanError("memory_limit chooses what is recomputed, and checkpoint says it: leave out one of them")
    if options.offload:
        raise PlanError("memory_limit does not go with offload: leave out one of them")
    workers = any(label.startswith("cpu") for label in options.devices)
    if workers and options.memory_limit == DEVICE_MEMORY and options.cluster is None:
        raise PlanError(
            f"memory_limit is {DEVICE_MEMORY!r}, and CPU workers share the memory of the machine: write the bytes that "
            "each may keep for backward, as in memory_limit=2 * 10**9"
        )


def check_placed(options: Options) -> None:
    """Raise PlanError for options that do not go with a strategy, which places all ops."""
    if isinstance(options.schedule, str) and options.schedule in {*SCHEDULES, AUTO} - {*STRAIGHT}:
        raise PlanError(
            f"schedule is {options.schedule!r}; with a strategy, write one of {', '.join(STRAIGHT)}, or a grid"
        )
    if not isinstance(options.checkpoint, str):
        raise PlanError(
            "checkpoint is of stages, which a strategy does not have; write 'never', 'except_last' or 'always'"
        )


def check_graphs(options: Options) -> None:
    """Raise PlanError for graphs on devices that have none, and for torch's own, which do not suit micro-batches."""
    backend = backend_of(options.compile_stages)
    devices = [torch.device(label) for label in options.devices if is_local(label)]
    if backend == "cudagraphs" or (backend == "inductor" and any(map(has_streams, devices)) and records_graphs()):
        asked = (
            "is 'cudagraphs'" if backend == "cudagraphs" else "is for Inductor, with torch's config.triton.cudagraphs"
        )
        raise PlanError(
            f"compile_stages {asked}: such graphs keep results where their next run writes, and a pipe has results of "
            f"several micro-batches at a time; write compile_stages={NAME!r}"
        )
    for device in devices:
        if backend is device_graphs and (reason := refusal(device)):
            raise PlanError(f"compile_stages is {NAME!r}, and {reason}: leave it out, or name another backend")


def check_backward(options: Options) -> None:
    """Raise PlanError if options ask for generated backward beside others that it does not go with."""
    if options.backward == "code" and (because := autograd_because(options)):
        symbolic_sizes().need('backward="code"')
        raise PlanError(f"backward='code' does not go with {because} yet: leave out one of them")
    planned = () if options.plan is None else tuple(stage.checkpoint for stage in options.plan.stages)
    if not is_coded(options) and isinstance(options.checkpoint, str) and "selective" in (options.checkpoint, *planned):
        raise PlanError(
            "checkpoint='selective' says for each value whether it is kept, and autograd decides that by itself: "
            + _instead(options, "write 'except_last'")
        )
    if options.overlap_pairs:
        _check_pairs(options)


def _check_pairs(options: Options) -> None:
    """Raise PlanError for options with which a forward and a backward cannot run as one function."""
    if not is_coded(options):
        raise PlanError(
            "overlap_pairs puts the lines of a forward and of a backward into one function, and autograd computes "
            f"backward: {_instead(options, 'leave out overlap_pairs')}"
        )
    if options.compile_stages:
        raise PlanError("overlap_pairs does not go with compile_stages yet: leave out one of them")
    if options.ranks:
        raise PlanError(
            "overlap_pairs does not go with devices that are processes yet: leave it out, or run all devices in one "
            "process"
        )


def _instead(options: Options, otherwise: str) -> str:
    """What to write where generated backward is needed: the end of an error."""
    if options.backward == AUTO:
        return f"leave out {autograd_because(options)}, which has no generated backward, or {otherwise}"
    return f"add backward='code', or {otherwise}"
