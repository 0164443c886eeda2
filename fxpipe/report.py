"""A build for people: the table of what each stage holds, costs and moves, and the folder of all that was made."""

from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

from .compiled_stages import Backend, name_of
from .ir.opaque import Opaque
from .ir.plan import Plan
from .ir.profile import total
from .ir.transfers import add_transfers
from .ir.types import TensorType, nbytes
from .ir.units import show_bytes, show_seconds
from .street import Build
from .viz import svg

HEADERS = ("stage", "device", "ops", "parameters", "forward", "backward", "keeps", "takes", "gives", "recompute")


def explain(build: Build, backend: Backend | None = None) -> str:
    """One row per stage, for one micro-batch: parameters, predicted or measured time, bytes kept for backward, bytes
    that arrive and leave; then the values that travel through portals."""
    rows = [stage_row(build, index) for index in range(len(build.program.stages))]
    table = tabulate(rows, headers=HEADERS, disable_numparse=True, colalign=("right", "left", *["right"] * 7, "left"))
    head = (
        f"{build.graph.model}: {len(build.program.stages)} stages, {build.plan.chunks} micro-batches, "
        f"{build.schedule.name}; times {build.profile.source} for a micro-batch of {build.profile.batch}"
    )
    if backend is not None:
        head += f"\nstages compiled by {name_of(backend)}"
        if any(action.kind == "W" for action in build.schedule.place):
            head += "; backward of a compiled stage is not split: I computes all of it, W nothing"
    return "\n".join([head, "", table, *special_lines(build), *replica_lines(build.plan)])


def stage_row(build: Build, index: int) -> tuple[str, ...]:
    stage, planned = build.program.stages[index], set(build.plan.stages[index].ops)
    cost = total([op for op in build.profile.ops if op.name in planned])
    owned = [build.program.state(name) for name in stage.states]
    parameters = [s.type for s in owned if s.kind == "parameter" and isinstance(s.type, TensorType)]
    return (
        str(index),
        ", ".join(build.plan.stages[index].devices),
        str(len(stage.ops)),
        f"{sum(type.numel({}) for type in parameters):,}",
        show_seconds(cost.forward),
        show_seconds(cost.backward),
        show_bytes(cost.saved),
        show_bytes(sum(nbytes(build.program.types[name], build.sizes) for name in stage.takes)),
        show_bytes(sum(nbytes(build.program.types[name], build.sizes) for name in stage.gives)),
        stage.checkpoint,
    )


def special_lines(build: Build) -> list[str]:
    """What is out of the ordinary, one line each: portals, shared parameters, parts of parameters, submodules that are
    kept whole, lines in which the samples of a micro-batch meet."""
    program = build.program
    n = len(program.stages)
    portals = [move for move in program.moves if move.portal and move.source >= 0 and move.target < n]
    lines = [f"portal: {move.value}, from stage {move.source} to stage {move.target}" for move in portals]
    lines += [
        f"shared: {loan.state}, at home in stage {loan.home}, used by stage {loan.user}" for loan in program.loans
    ]
    lines += [
        f"part: {program.state(name).held}, held by stage {stage.index} on {stage.device}"
        for stage in program.stages
        for name in stage.states
        if program.state(name).part
    ]
    lines += [
        f"opaque: {op.target}, kept whole in stage {stage.index}, because of {op.target.origin} ({op.target.reason})"
        for stage in program.stages
        for op in stage.ops
        if isinstance(op.target, Opaque)
    ]
    lines += [
        f"mixes samples, each micro-batch by itself: {mixed.origin} ({mixed.what}); seen in {', '.join(mixed.outputs)}"
        for mixed in build.graph.mixed
        if build.plan.chunks > 1
    ]
    return ["", *lines] if lines else []


def replica_lines(plan: Plan) -> list[str]:
    """Which stages have replicas, one line each."""
    lines = [
        f"replicas: of stage {index} on {', '.join(stage.devices)}; in steps each has a slice of every micro-batch, "
        f"calls run on {stage.device}"
        for index, stage in enumerate(plan.stages)
        if stage.replicas
    ]
    return ["", *lines] if lines else []


def dump(build: Build, folder: Path, number: int) -> None:
    """Write all values of the build, numbered in the order they were made: `diff 01* 02*` shows what a pass did. The
    second build of a pipe, and those after it, go into subfolders."""
    mode = "train" if build.graph.training else "eval"
    path = folder if number == 1 else folder / f"{number}-{mode}"
    path.mkdir(parents=True, exist_ok=True)
    steps = {"capture": build.graph, **build.trail}
    for at, (name, value) in enumerate(steps.items()):
        (path / f"{at:02}-{name.replace('_', '-')}.txt").write_text(f"{value}\n")
    programs = add_transfers(build.schedule, build.program)
    facts = {"profile.txt": build.profile, "schedule.txt": build.schedule, "programs.txt": programs}
    facts |= {"timeline.txt": build.timeline}
    for name, fact in facts.items():
        (path / name).write_text(f"{fact}\n")
    (path / "timeline.svg").write_text(svg.draw(build.timeline))
    for name, text in build.files.items():
        (path / name).write_text(text)
