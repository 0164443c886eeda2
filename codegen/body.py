"""The body of a stage's `forward`.

    ops -> groups that come from one line of the user's -> statements -> lines

A comment with that line stands above each group; ops in the same region share one `with`; a large tensor that nobody
needs any more is let go with `del`. fx prints one flat list instead, with every release squeezed behind its statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, takewhile
from pathlib import PurePath

from fxpipe.codegen.assignments import assignments
from fxpipe.codegen.expr import EmitError
from fxpipe.codegen.lines import INDENT, WIDTH, Brackets, Doc, layout, prefix
from fxpipe.codegen.names import clip, code_comment, prose
from fxpipe.codegen.releases import releases
from fxpipe.codegen.spelling import literal
from fxpipe.codegen.variables import Variables
from fxpipe.ir.graph import Op, Origin, Region
from fxpipe.ir.opaque import Opaque
from fxpipe.ir.program import Program, Stage


@dataclass(frozen=True)
class _Step:
    """One op of the stage with its statements, and the variables to let go of after it. `group` counts, along the
    stage, the lines of the user's that ops come from."""

    op: Op
    statements: tuple[Doc, ...]
    releases: tuple[str, ...]
    group: int


def body(program: Program, stage: Stage, variables: Variables) -> list[str]:
    """Its lines."""
    steps = _steps(program, stage, variables)
    comments = _comments(steps)
    lines: list[str] = []
    shown = -1
    for regions, run in groupby(steps, key=lambda step: step.op.regions):
        block = list(run)
        depth, top = 2, not lines
        if regions:
            if block[0].group == block[-1].group != shown:  # one line of the user's: it stands above the `with`
                shown = block[0].group
                lines += _comment(comments[shown], depth, top)
            elif block[0].group != shown and not top:
                lines.append("")
            lines += layout(_with(regions, block[0].op), depth)
            depth, top = 3, True
        for step in block:
            if step.group != shown:
                shown = step.group
                lines += _comment(comments[shown], depth, top)
            lines += _step_lines(step, depth)
            top = False
    return [*lines, *_return(stage, variables)]


def _step_lines(step: _Step, depth: int) -> list[str]:
    """The statements; those that draw random numbers in a block that seeds them."""
    inner = depth + 1 if step.op.random else depth
    lines = []
    if isinstance(step.op.target, Opaque):
        lines += [clip(f"{INDENT * depth}# opaque: {_origin(step.op.target.origin, '')}", WIDTH)]
    lines += [f"{INDENT * depth}with draw({step.op.draw}):"] if step.op.random else []
    lines += [line for statement in step.statements for line in layout(statement, inner)]
    lines += layout(Brackets("del ", step.releases, "", "bare"), depth) if step.releases else []
    return lines


def _return(stage: Stage, variables: Variables) -> list[str]:
    given = tuple(variables.of[name] for name in stage.gives)
    if not given:
        return [] if stage.ops else layout("pass", 2)
    return layout(Brackets("return ", given, "", "bare") if len(given) > 1 else f"return {given[0]}", 2)


def _steps(program: Program, stage: Stage, variables: Variables) -> list[_Step]:
    gone = releases(stage, variables, program.types)
    ops = [op for op in stage.ops if op.name not in variables.folded]
    lines = [(op.origin.file, op.origin.line, op.origin.code) for op in ops]
    groups = list(accumulate((new != old for old, new in pairwise(lines)), initial=0))
    taken = {text.partition(".")[0] for text in variables.of.values()}
    return [
        _Step(op, tuple(assignments(op, variables, taken)), gone[op.name] if group < groups[-1] else (), group)
        for op, group in zip(ops, groups, strict=False)
    ]


# Comments and regions -------------------------------------------------------------------------------------------------


def _comments(steps: Sequence[_Step]) -> list[str]:
    """For each group, the user's file, line, module and code."""
    texts = []
    for _, run in groupby(steps, key=lambda step: step.group):
        ops = [step.op for step in run]
        texts.append(_origin(ops[0].origin, _common([op.origin.module for op in ops])))
    return texts


def _common(paths: Sequence[str]) -> str:
    """The module that all of these are in."""
    parts = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _origin(origin: Origin, module: str) -> str:
    place = f"{PurePath(origin.file).name.replace(' ', '_')}:{origin.line}" if origin.file else ""
    return "  ".join(part for part in (prose(place), prose(module), code_comment(origin.code)) if part)


def _comment(text: str, depth: int, top: bool) -> list[str]:
    """The comment line, after an empty line unless it opens a block."""
    line = clip(f"{INDENT * depth}# {text}", WIDTH) if text else None
    return [*([] if top else [""]), *([line] if line else [])]


def _with(regions: Sequence[Region], op: Op) -> Doc:
    return Brackets("with ", tuple(_context(region, op) for region in regions), ":", "bare")


def _context(region: Region, op: Op) -> Doc:
    if region.kind == "grad":
        return "torch.enable_grad()" if region.args[0] else "torch.no_grad()"
    if region.kind == "autocast":
        device, dtype, enabled, cache = region.args
        options = {"dtype": dtype, "enabled": None if enabled else False, "cache_enabled": cache}
        given = (prefix(f"{key}=", literal(value)) for key, value in options.items() if value is not None)
        return Brackets("torch.autocast(", (literal(device), *given), ")")
    raise EmitError(f"no context is known for the region {region} of the op {op.name!r}, at {op.origin}")
