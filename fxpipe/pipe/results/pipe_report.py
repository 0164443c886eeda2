"""One page about a pipe: what was decided, what crosses each cut, memory, time, the generated code. All of it is what
`explain`, `compare`, `diagnose` and the build say."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.graph.value_types import TensorType, nbytes
from fxpipe.ir.program.program import Program, show_stage
from fxpipe.ir.timeline import KEPT, WITH_PARAMETERS, Timeline
from fxpipe.ir.units import count, show_bytes, show_seconds
from fxpipe.pipe.build.build import Build
from fxpipe.pipe.build.build_report import cost_table, replica_lines, special_lines, summary
from fxpipe.pipe.options.option_forms import shown
from fxpipe.pipe.verify.versions import versions
from fxpipe.schedules.diagnosis.time_split import PARTS
from fxpipe.viz import program_picture, timeline_picture
from fxpipe.viz.report_page import bars, beside, folded, lines, listing, page, paragraph, picture, table

from .comparison import Comparison
from .diagnosis import shown as shown_part
from .generated_lines import pieces, user_lines
from .memory_kinds import KINDS, predicted_kinds
from .pipe_picture import given
from .strategy_table import table as operator_cuts

UNTIMED = "No step was timed: pipe.step(..., timeline=True) before pipe.report(...) adds what was measured."
MEMORY_COLORS = dict(zip(KINDS, "FBWA", strict=True))
TIME_COLORS = dict(zip(map(shown_part, PARTS), "FRBITAW", strict=True))


def report(pipe: Any, path: str | Path) -> Path:
    """Write one page about the pipe, and return its path: stages, what moves between them, memory, the predicted
    timeline, each generated file beside the lines of the model, versions and options; after a step with
    `timeline=True` also the measured timeline, where the time went, and what to change. It is about the kind of call
    that was compiled or run last.

    The page is one `.html` file without scripts that loads nothing, so it can be sent to others: it has the names and
    lines of the model, no values of tensors. Over ranks each rank can write it alone. Raises PlanError for another
    suffix, FxpipeError before the first call, and OSError if the file cannot be written."""
    made, path = pipe.build, Path(path)
    if path.suffix.lower() != ".html":
        raise PlanError(
            f"{str(path)!r} is no page: write a name that ends with .html, as in pipe.report('report.html')"
        )
    compared = None if pipe._state.timed is None else pipe.compare()
    sections = {
        "Model": _model(made),
        "Stages": _stages(pipe, made),
        "Cuts": _cuts(made),
        "Memory": _memory(pipe, made, compared),
        "Timeline": _timeline(pipe, made, compared),
        "Where the time goes": _time(pipe, made),
        "Generated files": _files(made),
        "Versions and options": _setting(pipe),
    }
    text = page(made.graph.model, summary(made, pipe._state.cache.backend), sections)
    path.write_bytes(text.encode(errors="replace"))
    return path


def _model(made: Build) -> str:
    graph = made.graph
    kinds = [state.type for state in graph.states if state.kind == "parameter"]
    parameters = sum(kind.numel({}) for kind in kinds if isinstance(kind, TensorType))
    what = "a step" if graph.loss is not None else "a call"
    mode = "in training mode" if graph.training else "in evaluation mode"
    told = f"{what} {mode}: {count(len(graph.ops), 'op', 'ops')}, {parameters:,} parameters in "
    told += count(len(kinds), "tensor", "tensors")
    rows = [(one.path, str(one.type), "whole" if one.batch_dim is None else f"cut along dimension {one.batch_dim}")
            for one in graph.inputs]  # fmt: skip
    return paragraph(f"{graph.model}, {told}.", "") + table(("input", "type", "micro-batches"), rows, text=True)


def _stages(pipe: Any, made: Build) -> str:
    program = made.program
    notes = [line for line in (*special_lines(made), *replica_lines(made)) if line]
    cuts = folded("how operators are cut", listing(operator_cuts(made.cuts))) if made.cuts else ""
    ops = "\n".join(
        folded(
            f"stage {stage.index} on {', '.join(stage.devices)}: tensors and ops", listing(show_stage(program, stage))
        )
        for stage in program.stages
    )
    stages = picture(program_picture.draw(program), "stages", "fit")
    return stages + table(*cost_table(made)) + lines(notes) + cuts + ops


def _cuts(made: Build) -> str:
    headers = ("from", "to", "what", "type", "bytes", "how")
    sizes = ", ".join(f"{name} = {size}" for name, size in made.sizes.items())
    told = "Bytes are of one micro-batch" + (f", with {sizes}." if sizes else ".")
    return paragraph(told) + table(headers, _crossing(made), text=True)


def _crossing(made: Build) -> Iterator[tuple[str, ...]]:
    """A row for each value and each tensor of the model that goes from stage to stage."""
    program = made.program
    for move in sorted(program.moves, key=lambda one: (one.source, one.target)):
        how = "portal, past the stages between" if program.is_portal(move) else ""
        if program.to_epilogue(move):
            how = "for the epilogue"
        if found := program.collective_of(move):
            how = found.kind
        what = move.given + (f", as {move.value}" if move.part else "")
        yield *_ends(program, move.source, move.target), what, *_size(made, move.value), how
    for loan, how in (
        *((one, "shared weight: once a step, and its gradient back") for one in program.loans),
        *((one, "written buffer: once a step, and back") for one in program.written_loans),
    ):
        path = program.state(loan.state).held
        yield *_ends(program, loan.home, loan.user), path, *_size(made, loan.state), how


def _ends(program: Program, *stages: int) -> Iterator[str]:
    for index in stages:
        inside = 0 <= index < len(program.stages)
        yield f"stage {index} ({program.devices[index]})" if inside else "caller"


def _size(made: Build, name: str) -> tuple[str, str]:
    kind = made.program.types[name]
    return str(kind), show_bytes(nbytes(kind, made.sizes))


def _memory(pipe: Any, made: Build, compared: Comparison | None) -> str:
    kept = None if compared is None else compared.timelines[0][1]
    if kept is None or pipe._state.timed.made is not made or kept.counts != KEPT:
        kept = None
    found = predicted_kinds(made, kept)
    kinds = [kind for kind in KINDS if any(getattr(one, kind) for one in found.values())]
    names = {kind: KEPT if kind == "activations" else kind for kind in kinds}
    amounts = {label: {name: float(getattr(one, k)) for k, name in names.items()} for label, one in found.items()}
    cells = {label: [*map(show_bytes, amounts[label].values()), show_bytes(one.total)] for label, one in found.items()}
    timelines = f"the timelines below, which have only what is {KEPT}" if kept else "the timeline below"
    told = f"Predicted, at the fullest moment of a step, as in {timelines}. The optimizer's state is not counted: a "
    colors = {name: MEMORY_COLORS[kind] for kind, name in names.items()}
    return paragraph(told + "pipe does not know it.") + bars(colors, amounts, cells, WITH_PARAMETERS)


def _timeline(pipe: Any, made: Build, compared: Comparison | None) -> str:
    timelines: Sequence[tuple[str, Timeline]] = (("predicted", made.timeline),)
    told = paragraph(UNTIMED)
    if compared is not None:
        timelines, told = compared.timelines, _of_another(pipe, made) + listing(str(compared))
    drawn = [picture(timeline_picture.draw(line, f"{line.name}, {name}"), name) for name, line in timelines]
    return "\n".join([*drawn, told, folded("the schedule", listing(str(made.schedule)))])


def _of_another(pipe: Any, made: Build) -> str:
    same = pipe._state.timed.made is made
    return "" if same else paragraph("The last timed step was of another kind of call than the stages above.", "advice")


def _time(pipe: Any, made: Build) -> str:
    if pipe._state.timed is None:
        return paragraph(UNTIMED)
    found = pipe.diagnose()
    parts = found.measured.parts
    cells = {
        label: [*(show_seconds(own[part]) for part in PARTS), show_seconds(found.measured.seconds)]
        for label, own in parts.items()
    }
    amounts = {label: {shown_part(part): own[part] for part in PARTS} for label, own in parts.items()}
    return paragraph(found.head) + bars(TIME_COLORS, amounts, cells, "step") + paragraph(found.advice, "advice")


def _files(made: Build) -> str:
    known = user_lines(made.graph)
    return "\n".join(
        folded(name, beside(pieces(text, known)) if name.endswith(".py") else listing(text))
        for name, text in made.files.items()
    )


def _setting(pipe: Any) -> str:
    facts = {"versions": versions(), "platform": platform.platform()}
    options = {f"{name}=": shown(value) for name, value in given(pipe.options).items()}
    return table(("", ""), [*facts.items(), *options.items()], text=True)
