"""A build as text: the table of what each stage holds, costs and moves, and a folder with all intermediate results."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import fsum
from pathlib import Path

from tabulate import tabulate

from fxpipe.ir.graph.graph import Graph, Origin, called
from fxpipe.ir.graph.opaque_call import Opaque, has_vjp
from fxpipe.ir.graph.value_types import TensorType, nbytes
from fxpipe.ir.plan.plan import without_replicas
from fxpipe.ir.program.kept_bytes import size
from fxpipe.ir.program.program import Loan
from fxpipe.ir.program.transfers import add_transfers
from fxpipe.ir.units import count, show_bytes, show_seconds
from fxpipe.pipe.results.strategy_table import table
from fxpipe.schedules.simulate.action_costs import stage_costs

from . import batch_statistics
from .build import Build
from .compiled.compiled_stages import Backend, name_of

COSTS = ("ops", "parameters", "forward", "backward", "keeps", "takes", "gives", "recompute")
HEADERS, DEVICE_HEADERS = ("stage", "device", *COSTS), ("device", "stages", *COSTS)


def explain(build: Build, backend: Backend | None = None) -> str:
    """One row per stage, for one micro-batch: parameters, predicted or measured time, bytes kept for backward, bytes
    that arrive and leave; then the values that move through portals. With a strategy, stages are many and small: the
    text has the cut of each operator, then one row per device."""
    headers, rows = cost_table(build)
    columns = ("left", "right") if build.program.pipeline else ("right", "left")
    align = (*columns, *["right"] * 7, "left")
    about = [table(build.cuts), ""] if build.cuts else []
    about.append(tabulate(rows, headers=headers, disable_numparse=True, colalign=align))
    return "\n".join([summary(build, backend), "", *about, *special_lines(build), *replica_lines(build)])


def summary(build: Build, backend: Backend | None = None) -> str:
    """What is above the table: stages, micro-batches, schedule, where the times are from, and who compiles stages."""
    stages, devices = count(len(build.program.stages), "stage", "stages"), len(set(build.program.devices))
    where = f" on {count(devices, 'device', 'devices')}" if build.program.pipeline else ""
    chunks = count(build.plan.chunks, "micro-batch", "micro-batches")
    head = (
        f"{build.graph.model}: {stages}{where}, {chunks}, {build.schedule.name}; times {build.profile.source} for a "
        f"micro-batch of {build.profile.batch}"
    )
    if backend is not None:
        head += f"\nstages compiled by {name_of(backend)}"
        whole = any(stage.backward is None for stage in build.program.stages)
        if whole and any(action.kind == "W" for action in build.schedule.place):
            head += "; backward of a compiled stage is not split: I computes all of it, W nothing"
    return head


def cost_table(build: Build) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headers, and a row for each stage, or with a strategy for each device."""
    if build.program.pipeline:
        return DEVICE_HEADERS, [device_row(build, device) for device in dict.fromkeys(build.program.devices)]
    return HEADERS, [stage_row(build, index) for index in range(len(build.program.stages))]


def stage_row(build: Build, index: int) -> tuple[str, ...]:
    """The row of a stage, as in HEADERS."""
    stage, devices = build.program.stages[index], build.plan.stages[index].devices
    moved = _bytes(build, stage.takes), _bytes(build, stage.gives)
    return str(index), ", ".join(devices), *_costs(build, [index]), *moved, stage.checkpoint


def device_row(build: Build, device: str) -> tuple[str, ...]:
    """The row of a device: all its stages together. Takes and gives are the values that move from and to other
    devices."""
    program = build.program
    own = [stage.index for stage in program.stages if stage.device == device]
    takes = {m.value for m in program.moves if m.target in own and m.source not in own}
    gives = {m.value for m in program.moves if m.source in own and m.target not in own}
    recompute = dict.fromkeys(program.stages[index].checkpoint for index in own)
    moved = _bytes(build, takes), _bytes(build, gives)
    return device, str(len(own)), *_costs(build, own), *moved, ", ".join(recompute)


def _costs(build: Build, stages: Collection[int]) -> tuple[str, ...]:
    """Ops, parameters, forward time, backward time and bytes kept, of these stages together. Replicas of a stage share
    micro-batches: then these are the times of the slowest one, and the bytes of the one with the most samples, as in
    the simulated step."""
    planned = [build.plan.stages[index] for index in stages]
    runs = replace(build.plan, stages=tuple(planned))
    costs = stage_costs(
        runs if build.graph.loss is not None else without_replicas(runs),
        build.profile,
        kept=[build.kept[index] for index in stages] if build.kept else (),
    )
    own = [build.program.stages[index] for index in stages]
    owned = [build.program.state(name) for stage in own for name in stage.states]
    parameters = [s.type for s in owned if s.kind == "parameter" and isinstance(s.type, TensorType)]
    return (
        str(sum(len(stage.ops) for stage in planned)),
        f"{sum(type.numel({}) for type in parameters):,}",
        show_seconds(fsum(cost.forward for cost in costs)),
        show_seconds(fsum(cost.backward for cost in costs)),
        show_bytes(sum(cost.saved for cost in costs)),
    )


def _bytes(build: Build, values: Iterable[str]) -> str:
    return show_bytes(sum(nbytes(build.program.types[name], build.sizes) for name in values))


def special_lines(build: Build) -> list[str]:
    """One line each: what was chosen for options, portals, shared parameters, parts of parameters, submodules that are
    kept whole, ops that mix the samples of a micro-batch, batch statistics."""
    program = build.program
    lines = [*build.chosen]
    lines += [f"portal: {move.value}, from stage {move.source} to stage {move.target}" for move in program.portals]
    lines += [
        f"shared: {loan.state}, at home in stage {loan.home}, used by stage {loan.user}{sent(build, loan)}"
        for loan in program.loans
    ]
    lines += [
        f"written away: {loan.state}, at home in stage {loan.home}, written by stage {loan.user}{sent(build, loan)}"
        for loan in program.written_loans
    ]
    lines += [
        f"part: {program.state(name).held}, held by stage {stage.index} on {stage.device}"
        for stage in program.stages
        for name in stage.states
        if program.state(name).part
    ]
    lines += [
        f"opaque: {op.target}, kept whole in stage {stage.index}, {op.target.because}"
        for stage in program.stages
        for op in stage.ops
        if isinstance(op.target, Opaque)
    ]
    if (epilogue := build.graph.epilogue) is not None and build.plan.chunks > 1:
        lines.append(
            f"epilogue: {count(len(epilogue.ops), 'op runs', 'ops run')} once, on what all micro-batches give, as the "
            f"whole batch is needed from {_first_line(epilogue)}"
        )
    lines += backward_lines(build)
    lines += build.pairs
    lines += [
        f"mixes samples, each micro-batch by itself: {mixed.origin} ({mixed.what}); seen in {', '.join(mixed.outputs)}"
        for mixed in build.graph.mixed
        if build.plan.chunks > 1
    ]
    replicas = any(stage.replicas for stage in build.plan.stages)
    if build.batch_norms and (build.plan.chunks > 1 or replicas):
        lines.append(batch_statistics.line(build.batch_norms, build.plan.deferred_batch_norm, replicas))
    written = batch_statistics.written_buffers(build.graph)
    if written and (build.plan.chunks > 1 or replicas):
        lines.append(batch_statistics.line_of_written(written))
    return ["", *lines] if lines else []


def _first_line(epilogue: Graph) -> Origin:
    """The line of the first op that reads values of samples, and not only their sizes."""
    taken = {item.name for item in epilogue.inputs if item.batch_dim is not None}
    reading = (op for op in epilogue.ops if not taken.isdisjoint(op.reads) and called(op) != "size")
    return next(reading, epilogue.ops[-1]).origin


def sent(build: Build, loan: Loan) -> str:
    """The bytes that a loan sends to another device, once a step; its gradient takes the same way back."""
    places = build.program.devices
    return "" if places[loan.home] == places[loan.user] else f", {_bytes(build, [loan.state])} once a step"


def borrowed_share(build: Build) -> tuple[int, float]:
    """The bytes of the model's tensors that stages borrow from other devices in a step, and their share of those that
    the program uses."""
    program = build.program
    loans = {(one.state, program.devices[one.user]) for one in (*program.loans, *program.written_loans)
             if program.devices[one.home] != program.devices[one.user]}  # fmt: skip
    moved = sum(nbytes(program.types[state], build.sizes) for state, _ in loans)
    whole = sum(nbytes(program.types[name], build.sizes) for stage in program.stages for name in stage.states)
    return moved, moved / max(1, whole)


def backward_lines(build: Build) -> list[str]:
    """Which stages have their backward as code, and why others do not; nothing if no code was asked for."""
    program = build.program
    coded = [str(stage.index) for stage in program.stages if stage.backward is not None]
    others = [
        f"backward of stage {stage.index} by autograd: {stage.autograd_because}"
        for stage in program.stages
        if stage.autograd_because
    ]
    parts = [
        f"in stage {stage.index}, autograd computes the gradients of {', '.join(whole)}, kept whole"
        for stage in program.stages
        if (whole := dict.fromkeys(str(op.target) for op in stage.ops if has_vjp(op)))
    ]
    several = "s" if len(coded) > 1 else ""
    head = f"backward of stage{several} {', '.join(coded)} as code"
    exact = {index: f"{size(kept.saved):,}" for index, kept in enumerate(build.kept) if kept is not None}
    kept = ", ".join(exact.values() if len(exact) == len(coded) else (f"stage {n}: {x}" for n, x in exact.items()))
    if kept:
        head += f"; bytes kept of a micro-batch, exactly: {kept}"
    return [*([head] if coded else []), *parts, *others]


def replica_lines(build: Build) -> list[str]:
    """Which stages have replicas, one line each, and which of them the times are of."""
    lines = [
        f"replicas: of stage {index} on {', '.join(stage.devices)}; in steps each has a slice of every micro-batch, "
        f"calls run on {stage.device}"
        for index, stage in enumerate(build.plan.stages)
        if stage.replicas
    ]
    if lines and build.graph.loss is not None:
        lines.append("with replicas, forward and backward are those of the slowest slice, keeps of the largest")
    return ["", *lines] if lines else []


def dump(build: Build, folder: Path, number: int) -> None:
    """Write all values of the build; graphs and programs are numbered in the order they were made, so `diff 01* 02*`
    shows what a pass did. The second and later builds of a pipe go into subfolders."""
    mode = "train" if build.graph.training else "eval"
    path = folder if number == 1 else folder / f"{number}-{mode}"
    path.mkdir(parents=True, exist_ok=True)
    steps = {"capture": build.graph, **build.trail}
    for at, (name, value) in enumerate(steps.items()):
        (path / f"{at:02}-{name.replace('_', '-')}.txt").write_text(f"{value}\n")
    facts = {
        "profile.txt": build.profile,
        "schedule.txt": build.schedule,
        "programs.txt": add_transfers(build.schedule, build.program),
        "timeline.txt": build.timeline,
    }
    texts = {name: f"{fact}\n" for name, fact in facts.items()}
    for name, text in {**texts, **build.files}.items():
        (path / name).write_text(text)
    build.timeline.draw(path / "timeline.svg")
