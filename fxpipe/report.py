"""The table of a build: what each stage holds, costs and moves."""

from __future__ import annotations

from tabulate import tabulate

from .ir.program import Program
from .ir.types import nbytes
from .street import Build

HEADERS = ("stage", "device", "ops", "parameters", "forward", "backward", "keeps", "takes", "gives", "recompute")


def explain(build: Build) -> str:
    """One row per stage, for one micro-batch: parameters, predicted or measured time, bytes kept for backward, bytes
    that arrive and leave; then the values that travel through portals."""
    rows = [stage_row(build, index) for index in range(len(build.program.stages))]
    table = tabulate(rows, headers=HEADERS, disable_numparse=True, colalign=("right", "left", *["right"] * 7, "left"))
    head = (
        f"{build.graph.model}: {len(build.program.stages)} stages, {build.plan.chunks} micro-batches, "
        f"{build.plan.schedule}; times {build.profile.source} for a micro-batch of {build.profile.batch}"
    )
    return "\n".join([head, "", table, *portal_lines(build.program)])


def stage_row(build: Build, index: int) -> tuple[str, ...]:
    stage = build.program.stages[index]
    costs = [build.profile.op(op.name) for op in stage.ops if op.name in build.profile.names]
    parameters = [build.program.state(name) for name in stage.states]
    sizes = build.profile.sizes
    return (
        str(index),
        stage.device,
        str(len(stage.ops)),
        f"{sum(s.type.numel(sizes) for s in parameters if s.kind == 'parameter'):,}",
        seconds(sum(cost.forward for cost in costs)),
        seconds(sum(cost.backward for cost in costs)),
        amount(sum(cost.saved for cost in costs)),
        amount(sum(nbytes(build.program.types[name], sizes) for name in stage.takes)),
        amount(sum(nbytes(build.program.types[name], sizes) for name in stage.gives)),
        stage.checkpoint,
    )


def portal_lines(program: Program) -> list[str]:
    """`skip goes from stage 0 to stage 3 through a portal`, one line per value."""
    n = len(program.stages)
    portals = [move for move in program.moves if move.portal and move.source >= 0 and move.target < n]
    lines = [f"portal: {move.value}, from stage {move.source} to stage {move.target}" for move in portals]
    lines += [f"shared: {loan.state}, at home in stage {loan.home}, used by stage {loan.user}" for loan in program.loans]
    return ["", *lines] if lines else []


def seconds(value: float) -> str:
    """Three digits and a fitting unit.

    >>> seconds(0.00123)
    '1.23 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def amount(count: int) -> str:
    """Bytes with a fitting unit, powers of 1,024.

    >>> amount(1536)
    '1.5 KiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
