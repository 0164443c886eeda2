"""The class of a generated scheduler, and what its base wants to know: the top of the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxpipe.codegen.lines import INDENT, Brackets, layout
from fxpipe.codegen.names import string
from fxpipe.codegen.places import Places
from fxpipe.ir.program import Program, Stage
from fxpipe.ir.types import TensorType


def attributes(program: Program, places: Places, base: str, totals: Program | None = None) -> list[str]:
    """The class and what its base wants to know. `totals`, of one stage, runs before the batch is cut."""
    takes = () if totals is None else totals.stages[0].takes
    known = {name for stage in program.stages for name in stage.takes}
    known |= {*takes, *(output.value for output in program.graph.outputs)}
    sizes = [size for size in program.graph.sizes if size.name in known]
    inputs = [item for item in program.graph.inputs if item.path]
    values = {
        "devices": [string(stage.device) for stage in program.stages],
        "inputs": [row(places.name(i.name), i.batch_dim) for i in inputs],
        "sizes": [row(places.name(s.name), places.name(s.input), s.dim) for s in sizes],
        "outputs": [row(places.name(o.value), o.batch_dim, o.reduce) for o in program.graph.outputs],
        "detached": [string(places.name(i.name)) for i in inputs if program.types[i.name] != i.type],
    }
    if any(stage.replicas for stage in program.stages):
        values["replicas"] = [names(stage.replicas) for stage in program.stages]
    lines = [f"class Scheduler({base}):"]
    for name, rows in values.items():
        if rows:
            lines += layout(Brackets(f"{name} = (", tuple(rows), ")", "literal"), 1)
    if totals is not None:
        taken = tuple(string(places.name(name)) for name in takes)
        given = tuple(string(places.name(name)) for name in totals.stages[0].gives)
        lines += [f"{INDENT}# what is computed from the whole batch, and from what of it"]
        pair = Brackets("(", given, ")", "literal"), Brackets("(", taken, ")", "literal")
        lines += layout(Brackets("totals = (", pair, ")", "literal"), 1)
    if any(op.random for stage in program.stages for op in stage.ops):
        lines.append(f"{INDENT}random = True")
    return lines


def row(*items: str | int | None) -> str:
    return f"({', '.join(string(item) if isinstance(item, str) else repr(item) for item in items)})"


def names(labels: Sequence[str]) -> str:
    """A tuple of texts."""
    return f"({', '.join(map(string, labels))}{',' if len(labels) == 1 else ''})"


def differentiable(name: str, program: Program) -> bool:
    """Whether a gradient comes back for the value."""
    kind = program.types[name]
    return isinstance(kind, TensorType) and kind.grad


def keep_dead_ends(program: Program) -> Program:
    """Nothing recomputed in stages that give nothing with a gradient: no backward ever comes to them, and a token must
    not lead it there."""

    def kept(stage: Stage) -> Stage:
        kinds = [program.types[name] for name in stage.gives]
        live = any(isinstance(kind, TensorType) and kind.grad for kind in kinds)
        return stage if live else replace(stage, checkpoint="never")

    return replace(program, stages=tuple(map(kept, program.stages)))


def apart(blocks: Iterable[Sequence[str]]) -> list[str]:
    """The blocks that are not empty, with an empty line between them."""
    lines = [line for block in blocks if block for line in (*block, "")]
    return lines[:-1]
