"""The docstring of a stage file: its takes and their sources, its gives and their targets. A reader can check the code,
the scheduler and the neighbours against it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fxpipe.codegen.text.line_layout import INDENT, WIDTH
from fxpipe.codegen.text.source_names import doc_prose
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.device_programs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fxpipe.ir.program.program import Move, Program, Stage

_RECOMPUTE = {
    "never": "",
    "selective": "what is cheap to compute is recomputed in backward",
    "except_last": "recomputed in backward, except the last micro-batch",
    "always": "recomputed in backward",
}


MADE = {ALL_REDUCE: "the sum", REDUCE_SCATTER: "a slice of the sum", ALL_GATHER: "the whole"}


class _Row(NamedTuple):
    label: str
    name: str
    type: str
    place: str


def header(
    program: Program, stage: Stage, variables: Mapping[str, str], title: str, notes: str, width: int = WIDTH
) -> list[str]:
    """The lines of the docstring, of up to `width` characters. `notes`: measured or estimated facts."""
    rows = [*_takes(program, stage, variables), *_gives(program, stage, variables), *_updates(program, stage)]
    rows += _keeps(program, stage, variables)
    facts = textwrap.wrap(doc_prose(_facts(program, stage, notes)), width)  # not indented, or formatters dedent all
    table = [*_table(rows, width), ""] if rows else []
    return [f'"""{title}', "", *table, *facts, '"""']


def _takes(program: Program, stage: Stage, variables: Mapping[str, str]) -> Iterator[_Row]:
    moves = {move.value: move for move in program.arriving[stage.index]}
    known = {size.name: f"{size.input}.shape[{size.dim}]" for size in program.graph.sizes}
    for name in stage.takes:
        place = known.get(name) or (_source(program, moves[name]) if name in moves else "known to every stage")
        yield _Row("takes", variables[name], str(program.types[name]), place)
    for loan in program.borrowing[stage.index]:
        if loan.state in stage.borrows:
            place = f"from stage {loan.home}, once a step: {program.state(loan.state).held}"
            yield _Row("borrows", variables[loan.state], str(program.types[loan.state]), place)


def _source(program: Program, move: Move) -> str:
    if move.source < 0:
        whole = any(item.name == move.value and not item.path for item in program.graph.inputs)
        return "of the whole batch" if whole else "from the caller"
    if (found := program.collective_of(move)) is not None:
        return f"{MADE[found.kind]} of what stage {move.source} and others give"
    return f"from stage {move.source}" + (", through a portal" if program.is_portal(move) else "")


def _gives(program: Program, stage: Stage, variables: Mapping[str, str]) -> Iterator[_Row]:
    leaving: dict[str, list[Move]] = {name: [] for name in stage.gives}
    for move in program.leaving[stage.index]:
        leaving[move.given].append(move)
    for name, moves in leaving.items():
        shared = [move for move in moves if move.part]
        near = [move for move in moves if not program.is_portal(move) and move not in shared]
        far = [move for move in moves if program.is_portal(move) and move not in shared]
        kind = str(program.types[name])
        for move in shared:
            found = program.collective_of(move)
            yield _Row("gives", variables[name], kind, f"to {found.kind if found else ''}, for stage {move.target}")
        if shared and not near:
            continue
        if near or not far:
            yield _Row("gives", variables[name], kind, _targets(program, near))
        if far:
            yield _Row("sends", variables[name], kind, _targets(program, far) + ", through a portal")


def _target(program: Program, move: Move) -> str:
    if move.target < len(program.stages):
        return f"stage {move.target}"
    return "the epilogue" if program.to_epilogue(move) else "the caller"


def _targets(program: Program, moves: list[Move]) -> str:
    places = [_target(program, move) for move in moves]
    return "to " + " and ".join(places) if places else ""


def _keeps(program: Program, stage: Stage, variables: Mapping[str, str]) -> Iterator[_Row]:
    for name in stage.backward.keeps if stage.backward is not None else ():
        if name not in (*stage.takes, *stage.borrows, *stage.gives):
            yield _Row("keeps", variables[name], str(program.types[name]), "for backward")


def _updates(program: Program, stage: Stage) -> Iterator[_Row]:
    for name in stage.mutates:
        yield _Row("updates", program.state(name).path, str(program.types[name]), "in place, once per micro-batch")


def _table(rows: list[_Row], width: int) -> list[str]:
    """Rows in columns; a row that is too wide goes on in a second line."""
    shown = [_Row(*(doc_prose(cell) for cell in row)) for row in rows]
    label, name, kind = (max(len(row[i]) for row in shown) for i in range(3))
    name, kind = min(name, 30), min(kind, 36)
    lines = []
    for row in shown:
        line = f"{INDENT}{row.label:<{label}}  {row.name:<{name}}  {row.type:<{kind}}  {row.place}".rstrip()
        if len(line) <= width:
            lines.append(line)
        else:
            indent = INDENT * 2 + " " * label
            first = f"{INDENT}{row.label:<{label}}  {row.name}  {row.type}"
            lines += textwrap.wrap(first, width, subsequent_indent=indent, drop_whitespace=True)
            lines += textwrap.wrap(row.place, width, initial_indent=indent, subsequent_indent=indent)
    return lines


def _facts(program: Program, stage: Stage, notes: str) -> str:
    types = [program.types[name] for name in stage.states if program.state(name).kind == "parameter"]
    count = sum(kind.numel({}) for kind in types if isinstance(kind, TensorType))
    ops = f"{len(stage.ops)} op{'' if len(stage.ops) == 1 else 's'}"
    facts = [f"{ops}, {count:,} parameter{'' if count == 1 else 's'}", _RECOMPUTE.get(stage.checkpoint, ""), notes]
    if stage.autograd_because:
        facts.append(f"backward by autograd: {stage.autograd_because}")
    return "; ".join(fact for fact in facts if fact)
