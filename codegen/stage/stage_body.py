"""The body of a stage's `forward`.

    ops -> groups that come from one line of the user's -> statements

A comment with that line stands above each group; ops in the same region share one `with`; a large tensor that is no
longer needed is deleted with `del`. fx prints one flat list instead, with a release behind every statement.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, takewhile
from types import MappingProxyType

from fxpipe.codegen.stage.assignments import assignments
from fxpipe.codegen.stage.variables import Variables, releases
from fxpipe.codegen.text.line_layout import Brackets, Doc, Infix, prefix
from fxpipe.codegen.text.object_text import literal
from fxpipe.codegen.text.op_text import EmitError
from fxpipe.codegen.text.source_names import code_comment, prose
from fxpipe.codegen.text.statements import BLANK, Assign, Block, Comment, Delete, Statement
from fxpipe.errors import file_name
from fxpipe.ir.graph.evaluate_graph import CUDNN_FLAGS
from fxpipe.ir.graph.graph import Op, Origin, Region, called, op_name
from fxpipe.ir.graph.legal_cuts import ENTER_VMAP, LEAVE_VMAP
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.program.program import Program, Stage

GRADIENT_OF = "gradient of "  # what comments in backward begin with


@dataclass(frozen=True)
class _Step:
    """One op of the stage: its statements, and the variables to delete after it. `group`: the number of the user's line
    that the op comes from, counted along the stage."""

    op: Op
    statements: tuple[Doc | Assign, ...]
    releases: tuple[str, ...]
    group: int


def body(
    program: Program,
    stage: Stage,
    variables: Variables,
    *,
    returns: Doc | None = None,
    about: str = "",
    owned: Collection[str] = (),
    taken: Collection[str] = (),
    recomputed: Collection[str] = (),
    sums: Mapping[str, Brackets] = MappingProxyType({}),
) -> tuple[Statement, ...]:
    """The statements of the stage's `forward`.

    - `returns`: what it returns; if not given, the values that the stage gives.
    - `about`: what comments say before the user's line.
    - `owned`: the takes that nobody else holds, so that they may be deleted.
    - `taken`: names of other code in the same method.
    - `recomputed`: the ops that forward has run before; their comments say so.
    - `sums`: for each gradient that is added up, the call that adds it, without the gradient.
    """
    steps = _steps(program, stage, variables, owned, taken, recomputed, sums)
    statements = _Writer(_comments(steps, about, recomputed), variables).all(steps, True)
    if returns is not None:
        return (*statements, prefix("return ", returns))
    given = tuple(variables.of[name] for name in stage.gives)
    if not given:
        return (*statements, *(() if stage.ops else ("pass",)))
    if len(given) > 1:
        return (*statements, Brackets("return ", given, "", "bare"))
    # `relu = F.relu(x)`: a name that says no more than the call is left out.
    nameless = steps and stage.gives[0] == steps[-1].op.name and re.sub(r"_\d+$", "", given[0]) == op_name(steps[-1].op)
    value = _value(statements[-1], given[0]) if nameless else None
    return (*statements, f"return {given[0]}") if value is None else (*statements[:-1], prefix("return ", value))


def _value(statement: Statement, name: str) -> Doc | None:
    """The value that the statement assigns to the variable `name`; None if it is another kind of statement."""
    head = statement if isinstance(statement, str) else getattr(statement, "head", "")
    if not isinstance(statement, (str, Brackets, Infix)) or not head.startswith(f"{name} = "):
        return None
    rest = head.removeprefix(f"{name} = ")
    return rest if isinstance(statement, str) else replace(statement, head=rest)


@dataclass
class _Writer:
    """Makes statements of steps. `shown`: the group of the last comment. In its methods, `top`: whether the next
    statement is the first of a block."""

    comments: Sequence[str]
    variables: Variables
    shown: int = -1

    def all(self, steps: Sequence[_Step], top: bool) -> list[Statement]:
        """The statements of these steps. Code inside a vmap is in a `try`, so that an error leaves the vmap: else the
        next task on the thread would run in it."""
        found: list[Statement] = []
        inside, start = 0, 0
        for index, step in enumerate(steps):
            name = called(step.op)
            if name == ENTER_VMAP and (inside := inside + 1) == 1:
                found += self.runs(steps[start:index], top)
                found += self.step(step, top and not found)
                start = index + 1
            elif name == LEAVE_VMAP and (inside := inside - 1) == 0:
                found.append(Block("try:", tuple(self.all(steps[start:index], True))))
                self.shown = step.group
                found.append(Block("finally:", tuple(_statements(step))))
                start = index + 1
        return [*found, *self.runs(steps[start:], top and not found)]

    def runs(self, steps: Sequence[_Step], top: bool) -> list[Statement]:
        """The statements of these steps, with those in the same regions in one `with`."""
        found: list[Statement] = []
        for regions, run in groupby(steps, key=lambda step: step.op.regions):
            block, first = list(run), top and not found
            if not regions:
                found += self.each(block, first)
                continue
            if block[0].group == block[-1].group:  # one line of the user's: its comment stands above the `with`
                found += self.comment(block[0].group, first)
            elif block[0].group != self.shown and not first:
                found.append(BLANK)
            found.append(Block(_with(regions, block[0].op), tuple(self.each(block, True))))
        return found

    def each(self, steps: Sequence[_Step], top: bool) -> list[Statement]:
        """The statements of these steps; those that draw from one seed in a block that sets it."""
        found: list[Statement] = []
        for draw, run in groupby(steps, key=lambda step: step.op.draw):
            block = list(run)
            if draw is None:
                for step in block:
                    found += self.step(step, top and not found)
                continue
            found += self.comment(block[0].group, top and not found)
            inside = [statement for step in block for statement in _statements(step, gone=step is not block[-1])]
            found.append(Block(f"with draw({draw}):", tuple(inside)))
            found += [Delete(block[-1].releases)] if block[-1].releases else []
        return found

    def step(self, step: _Step, top: bool) -> list[Statement]:
        return [*self.comment(step.group, top), *_statements(step)]

    def comment(self, group: int, top: bool) -> list[Statement]:
        """The comment above a group, after an empty line unless it opens a block; nothing if it is there already."""
        if group == self.shown:
            return []
        self.shown, text = group, self.comments[group]
        return [*([] if top else [BLANK]), *([Comment(text)] if text else [])]


def _statements(step: _Step, gone: bool = True) -> Iterator[Statement]:
    """The statements of a step; `gone`: with the deletion of what it needs last."""
    if isinstance(step.op.target, Opaque):
        yield Comment(f"opaque: {_origin(step.op.target.origin, '') or prose(step.op.target.reason)}")
    yield from step.statements
    if step.releases and gone:
        yield Delete(step.releases)


def _steps(
    program: Program,
    stage: Stage,
    variables: Variables,
    owned: Collection[str],
    taken: Collection[str],
    recomputed: Collection[str],
    sums: Mapping[str, Brackets],
) -> list[_Step]:
    gone = releases(stage, variables, program.types, owned)
    ops = [op for op in stage.ops if op.name not in variables.folded]
    lines = [(op.origin.file, op.origin.line, op.origin.code, op.name in recomputed) for op in ops]
    groups = list(accumulate((new != old for old, new in pairwise(lines)), initial=0))
    taken = {*taken, *variables.names}

    def statements(op: Op) -> tuple[Doc | Assign, ...]:
        return tuple(_summed(op, [*assignments(op, variables, taken)], variables, sums))

    return [
        _Step(op, statements(op), gone[op.name] if group < groups[-1] else (), group)
        for op, group in zip(ops, groups, strict=False)
    ]


def _summed(
    op: Op, statements: list[Doc | Assign], variables: Variables, sums: Mapping[str, Brackets]
) -> Iterator[Doc | Assign]:
    """The statements of an op, and the additions of gradients that it computes: `dw = accumulate(sums[0], x.sum())`."""
    made = {name: variables.of[name] for name in variables.unpacked.get(op.name, (op.name,)) if name in sums}
    value = _value(statements[-1], made[op.name]) if op.name in made else None
    yield from statements if value is None else statements[:-1]
    for name, variable in made.items():
        call = sums[name]
        given: tuple[Doc, ...] = (variable if value is None else value,)
        if call.head == "accumulate_mm(" and isinstance(value, Brackets):
            given = value.items
        yield replace(call, head=f"{variable} = {call.head}", items=(*call.items, *given))


# Comments and regions -------------------------------------------------------------------------------------------------


def _comments(steps: Sequence[_Step], about: str, recomputed: Collection[str]) -> list[str]:
    """For each group, the user's file, line, module and code; before them what `about` says, or that the group is
    recomputed."""
    texts = []
    for _, run in groupby(steps, key=lambda step: step.group):
        ops = [step.op for step in run]
        text = _origin(ops[0].origin, _common([op.origin.module for op in ops]))
        again = ops[0].name in recomputed
        start = about.replace(GRADIENT_OF, "recomputed: ") if again else about
        texts.append(f"{start}{text or 'the loss function'}" if start else text)
    return texts


def _common(paths: Sequence[str]) -> str:
    """The longest module path that all of these begin with."""
    parts = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _origin(origin: Origin, module: str) -> str:
    return "  ".join(part for part in (place(origin), prose(module), code_comment(origin.code)) if part)


def place(origin: Origin) -> str:
    """The file and line of an op as comments name them, `unet.py:18`; empty if they are not known."""
    return prose(f"{file_name(origin.file).replace(' ', '_')}:{origin.line}") if origin.file else ""


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
    if region.kind == "cudnn":
        flags = (prefix(f"{name}=", literal(value)) for name, value in zip(CUDNN_FLAGS, region.args, strict=True))
        return Brackets("torch.backends.cudnn.flags(", tuple(flags), ")")
    raise EmitError(f"no context is known for the region {region} of the op {op.name!r}, at {op.origin}")
