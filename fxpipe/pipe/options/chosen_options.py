"""What fxpipe has chosen for the options that are "auto", and why: a line each, for `explain()`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.program.kept_bytes import KeptBytes
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.schedules.make_schedule import AUTO, IN_TURN, WARM

from .backward_options import autograd_because
from .compile_options import Options, every_device


def chosen_lines(
    options: Options,
    graph: Graph,
    plan: Plan,
    schedule: Schedule,
    tried: int,
    memory: Mapping[str, tuple[int, int]],
    kept: Sequence[KeptBytes | None],
) -> tuple[str, ...]:
    """The lines for a plan of stages.

    - `tried`: from how many schedules this one was chosen.
    - `memory`: with `memory_limit`, by device the bytes that it needs and may use.
    - `kept`: what each stage keeps of a micro-batch, where its backward is code.
    """
    found = {
        "reduce": _reduce(options, graph),
        "schedule": _schedule(options, graph, schedule, tried),
        "stages_per_device": _stages_per_device(options, schedule),
        "warmup": _warmup(options, graph, schedule),
        "checkpoint": _checkpoint(options, plan, memory, kept),
        "backward": _backward(options, graph),
    }
    chosen = [f'{name}="auto" chose {what}' for name, what in found.items() if what]
    if options.plan is None and options.place is None:
        used = [device for stage in plan.stages for device in stage.devices]
        unused = not_used(options, set(used)) if len(options.devices) > 1 else ""
        chosen += [f"not used, as the model cannot be cut into more stages: {unused}"] * bool(unused)
    return tuple(chosen)


def lines_of_strategy(options: Options, graph: Graph) -> tuple[str, ...]:
    """The lines for a plan that cuts operators: the other options decide nothing there."""
    found = {"reduce": _reduce(options, graph), "backward": _backward(options, graph)}
    return tuple(f'{name}="auto" chose {what}' for name, what in found.items() if what)


def _backward(options: Options, graph: Graph) -> str:
    because = autograd_because(options) if options.backward == AUTO and graph.loss is not None else ""
    return f"autograd: {because} has no generated backward" if because else ""


def _reduce(options: Options, graph: Graph) -> str:
    found = [
        f"{one.reduce} for {'loss' if one.value == graph.loss else one.value}"
        for one in graph.outputs
        if one.batch_dim is None and one.reduce in ("mean", "sum") and one.value not in graph.taken
    ]
    if options.reduce != AUTO or options.chunks == 1 or not found:
        return ""
    text = f"{', '.join(found)}: read from {'its' if len(found) == 1 else 'their'} ops"
    if graph.totals is not None:
        names = ", ".join(output.value for output in graph.totals.outputs)
        text += f", in which each micro-batch divides by {names}, of the whole batch"
    return text


def _schedule(options: Options, graph: Graph, schedule: Schedule, tried: int) -> str:
    if options.schedule != AUTO:
        return ""
    if graph.loss is None:
        return f"{schedule.name}: a call has no other order"
    return f"{schedule.name}: of {tried} schedules the one with the shortest simulated step that fits into memory"


def _stages_per_device(options: Options, schedule: Schedule) -> str:
    if options.stages_per_device != AUTO or schedule.name not in IN_TURN or options.plan is not None:
        return ""
    return f"{schedule.num_stages // len(schedule.devices)}: as few as {schedule.name} can have"


def _warmup(options: Options, graph: Graph, schedule: Schedule) -> str:
    if options.warmup != AUTO or graph.loss is None or schedule.name not in WARM or options.plan is not None:
        return ""
    ahead: list[int] = []
    for stage in range(schedule.num_stages):
        kinds = [one.kind for row in schedule.devices for one in row if one.stage == stage]
        ahead.append(kinds.index("B"))
    return f"{', '.join(map(str, ahead))}: as many forwards as keep the stages busy and fit into memory"


def _checkpoint(
    options: Options, plan: Plan, memory: Mapping[str, tuple[int, int]], kept: Sequence[KeptBytes | None]
) -> str:
    own = [stage.checkpoint for stage in plan.stages]
    modes = f"{own[0]} for all stages" if len(set(own)) == 1 else ", ".join(own)
    if memory:
        exact = all(one is not None for one in kept) and all(label.startswith("cpu") for label in memory)
        needs = ", ".join(f"{label} needs {need:,} of {limit:,} bytes" for label, (need, limit) in memory.items())
        return (
            f"{modes}: the shortest simulated step within memory_limit; {needs} ({'exact' if exact else 'estimated'})"
        )
    if not options.saves_only:
        return ""
    if set(own) == {"never"}:
        return f"{modes}: recomputing would not lower the peak of what a device keeps"
    return f"{modes}: recomputed where that lowers the peak of what the device keeps"


def not_used(options: Options, used: Collection[str]) -> str:
    """What was asked for and is not done where only the devices `used` have a stage: "" if nothing."""
    rest = [label for label in every_device(options) if label not in used]
    found = [f"devices {', '.join(rest)}"] if rest else []
    if len(used) == 1:
        if options.schedule not in ("gpipe", AUTO):
            found.append(f"schedule={options.schedule!r}" if isinstance(options.schedule, str) else "schedule=")
        plain = Options(options.devices, options.chunks)
        names = ("warmup", "offload", "cut")
        found += [f"{name}=" for name in names if getattr(options, name) != getattr(plain, name)]
    return "; ".join(found)
