"""The docstring of a scheduler file: the schedule as a grid, how to read it, and the portals.

    clock    0   1   2   3
    cpu:0   F0  F1  F2
    cpu:1       F0  F1  F2

The grid is documentation only; `fxpipe.engines.local.forward_engine.clock` makes the order of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.codegen.text.line_layout import INDENT, WIDTH
from fxpipe.codegen.text.source_names import clip, doc_prose
from fxpipe.ir.plan.plan import FORWARD_AGAIN
from fxpipe.ir.program.program import Program
from fxpipe.ir.units import count

ORDER = (
    "F1 is the forward of micro-batch 1. Backward walks the grid from right to left: on each device the later",
    "micro-batch goes first. Autograd would not know that by itself: a token, a tensor without elements, goes from",
    "one micro-batch to the next.",
)
ONE_AFTER_THE_OTHER = ("F0 is the forward of the batch, which is one micro-batch: stages run one after the other.",)


def docstring(program: Program, chunks: int) -> list[str]:
    """The lines of the docstring, with GPipe's clock as the picture."""
    clock = draw_clock([doc_prose(device) for device in program.devices], chunks)
    picture = [INDENT + line for line in clock.splitlines()]
    n = len(program.stages)
    facts = f"{count(n, 'stage', 'stages')}, {count(chunks, 'micro-batch', 'micro-batches')}{recomputed(program)}"
    title = clip(f'"""{doc_prose(program.graph.model)}, pipelined: {facts}.', WIDTH)
    order = ORDER if chunks > 1 else ONE_AFTER_THE_OTHER
    return [title, "", *(line.rstrip() for line in picture), "", *order, *portals(program), '"""']


def portals(program: Program) -> list[str]:
    """The values that go past stages, for the end of a docstring."""
    lines = [f"{INDENT}{doc_prose(m.value)}  from stage {m.source} to stage {m.target}" for m in program.portals]
    return ["", "Portals, past the stages between:", "", *lines] if lines else []


def recomputed(program: Program) -> str:
    """Which stages are computed again in backward, for the title."""
    modes = {stage.checkpoint for stage in program.stages}
    if modes.isdisjoint(FORWARD_AGAIN):
        return ""
    if modes == {"always"}:
        return ", recomputed in backward"
    if modes == {"except_last"}:
        return ", all but the last recomputed in backward"
    some = [str(stage.index) for stage in program.stages if stage.checkpoint in FORWARD_AGAIN]
    return f", stage{'s' if len(some) > 1 else ''} {', '.join(some)} recomputed in backward"


def draw_clock(devices: Sequence[str], chunks: int) -> str:
    """GPipe's forward as a grid: a row for each stage, a column for each tick of the clock.

    >>> print(draw_clock(["cpu:0", "cpu:1"], 3))
    clock    0   1   2   3
    cpu:0   F0  F1  F2
    cpu:1       F0  F1  F2
    """
    shared = len(set(devices)) < len(devices)
    labels = [f"{device}, stage {j}" if shared else device for j, device in enumerate(devices)]
    width = max(map(len, ["clock", *labels])) + 1
    cell = len(str(chunks - 1)) + 3
    ticks = chunks + len(devices) - 1
    shown = min(ticks, (WIDTH - len(INDENT) - width - 4) // cell)
    rows = ["clock".ljust(width) + "".join(str(tick).rjust(cell) for tick in range(shown))]
    for j, label in enumerate(labels):
        cells = (f"F{t - j}" if 0 <= t - j < chunks else "" for t in range(shown))
        rows.append(label.ljust(width) + "".join(text.rjust(cell) for text in cells))
    more = " ..." if shown < ticks else ""
    return "\n".join((row + more).rstrip() for row in rows)
