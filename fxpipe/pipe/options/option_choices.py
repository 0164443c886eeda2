"""The options that a build tries: for each schedule that may be, and for as many stages as the model allows."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.errors import PlanError, warn
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import Opaque, opaques
from fxpipe.ir.plan.plan import Plan
from fxpipe.planning.stages.plan_stages import inner_cuts
from fxpipe.schedules.make_schedule import AUTO, FORWARDS_FIRST

from .chosen_options import not_used
from .compile_options import Options, candidates, every_device

SMALLER = "move these lines into the forward of a smaller submodule, and the rest is cut"


def choices(graph: Graph, options: Options, home: Plan | None) -> list[Options]:
    """The options to try: one for each schedule that the stages allow, if the schedule is "auto". A model that is kept
    whole gets one stage. `home`: the plan of the first build, which later ones follow."""
    if options.plan is None and options.place is None and (whole := _whole_model(graph)) is not None:
        return [_on_one_device(options, whole)]
    if home is None and _may_have_fewer_stages(options):
        options = _on_as_many_as_can_be(options, graph)
    if options.schedule != AUTO:
        return [options]
    if graph.loss is None:
        return [replace(options, schedule="gpipe")]
    dealt = None if home is None else tuple(stage.device for stage in home.stages)
    return [
        replace(options, schedule=name, devices=devices)
        for name, devices in candidates(options.devices, dealt)
        if not graph.trains_epilogue or name in FORWARDS_FIRST
    ]


def _whole_model(graph: Graph) -> Opaque | None:
    """The submodule that is kept whole if it is the model itself, or if no cut separates any op from it; else None."""
    kept = opaques(graph)
    together = bool(kept) and not inner_cuts(graph)
    return next((opaque for opaque in kept if together or not opaque.called), None)


def _on_one_device(options: Options, whole: Opaque) -> Options:
    """The options for one stage, on the first device. Raises PlanError over ranks, where each rank needs a stage."""
    if options.ranks:
        raise PlanError(
            f"{whole.origin}\n{whole.reason}: {whole} is kept whole, as one op, and each rank is to have a stage; move "
            "these lines into the forward of a submodule"
        )
    first = options.devices[0]
    unused = not_used(options, [first])
    if unused and whole.called:
        warn(
            f"nothing is pipelined: {whole} is kept whole, {whole.because}, and no cut leaves anything beside it; "
            f"{SMALLER}; not used: {unused}"
        )
    elif unused:  # capture has said why it is kept whole
        warn(f"not used, as {whole} is kept whole, in one stage: {unused}")
    mode = options.checkpoint
    if not isinstance(mode, str):
        mode = "except_last" if mode else "never"
    return replace(
        options, devices=(first,), schedule="gpipe", warmup=AUTO, checkpoint=mode, offload=frozenset(), cut="time",
        replicas={first: ()},
    )  # fmt: skip


def _may_have_fewer_stages(options: Options) -> bool:
    """Whether no option but the number of devices depends on the number of stages."""
    said = options.ranks or options.warmup != AUTO or options.offload or options.plan or options.place
    names = (options.schedule, options.checkpoint, options.cut)
    return not said and options.schedule in ("gpipe", "1f1b", AUTO) and all(isinstance(name, str) for name in names)


def _on_as_many_as_can_be(options: Options, graph: Graph) -> Options:
    """The options with only the first devices, if submodules that are kept whole do not allow a stage for each."""
    kept, most = opaques(graph), 1 + len(inner_cuts(graph))
    if not kept or most >= len(options.devices):
        return options
    why = "; ".join(f"{opaque} is kept whole, {opaque.because}" for opaque in kept)
    devices = options.devices[:most]
    warn(
        f"{most} of {len(options.devices)} devices have a stage: {why}; {SMALLER}; not used: "
        f"{not_used(options, every_device(replace(options, devices=devices)))}"
    )
    replicas = {device: others for device, others in options.replicas.items() if device in devices}
    return replace(options, devices=devices, replicas=replicas)
