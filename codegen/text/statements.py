"""Statements of generated code as values, and the printer that lays them out.

    Block("if m.grad:", (Comment("why"), Assign(("m.y",), Call("join", ("token", "m.y")))))

    if m.grad:
        # why
        m.y = join(token, m.y)

Emitters say what the code does; indentation, line breaks and where a remark fits beside its statement are decided here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxpipe.codegen.text.line_layout import INDENT, WIDTH, Brackets, Doc, Infix, layout, prefix
from fxpipe.codegen.text.source_names import clip


@dataclass(frozen=True)
class Call:
    """`function(args)`."""

    function: str
    args: tuple[Doc, ...]


@dataclass(frozen=True)
class Assign:
    """`targets = value`, or the value alone. The remark stands behind it if it fits there."""

    targets: tuple[str, ...]
    value: Doc | Call
    remark: str = ""


@dataclass(frozen=True)
class Delete:
    """`del places`; nothing if there are none."""

    places: tuple[str, ...]
    remark: str = ""


@dataclass(frozen=True)
class Comment:
    """A line of its own, cut where it is too long. `rule`: dashes to the end of the line."""

    text: str
    rule: bool = False


@dataclass(frozen=True)
class Lines:
    """Lines as they are, such as those of a string literal or an empty one."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """A class, a function, an `if`, a `with`: its head, colon included, and what is inside."""

    head: Doc
    body: tuple[Statement, ...]


Statement = Assign | Block | Call | Comment | Delete | Doc | Lines

BLANK = Lines(("",))
INSIDE = WIDTH - len(INDENT)  # columns in a class


def text_of(statements: Iterable[Statement], depth: int = 0) -> list[str]:
    """The lines of the statements, indented by `depth` steps."""
    return [line for statement in statements for line in _lines(statement, depth)]


def apart(groups: Iterable[Sequence[Statement]]) -> tuple[Statement, ...]:
    """The statements of all groups, an empty line between one group and the next."""
    found: list[Statement] = []
    for group in groups:
        if group:
            found += [BLANK, *group] if found else group
    return tuple(found)


def called_functions(statements: Iterable[Statement]) -> Iterator[str]:
    """The functions that statements call."""
    for statement in statements:
        if isinstance(statement, Block):
            yield from called_functions(statement.body)
        call = statement.value if isinstance(statement, Assign) else statement
        if isinstance(call, Call):
            yield call.function


def rows_of(name: str, rows: Iterable[Doc]) -> tuple[Statement, ...]:
    """`name = (row, row)`, or nothing where there are no rows."""
    found = tuple(rows)
    return (Assign((name,), tuple_of(found)),) if found else ()


def tuple_of(items: Iterable[Doc]) -> Brackets:
    """`(item, item)`."""
    return Brackets("(", tuple(items), ")", "literal")


def _lines(statement: Statement, depth: int) -> list[str]:
    if isinstance(statement, (str, Brackets, Infix)):
        return layout(statement, depth)
    if isinstance(statement, Call):
        return layout(_doc(statement), depth)
    if isinstance(statement, Assign):
        return _with_remark(_assign(statement, depth), statement.remark)
    if isinstance(statement, Delete):
        lines = layout(Brackets("del ", statement.places, "", "bare"), depth) if statement.places else []
        return _with_remark(lines, statement.remark)
    if isinstance(statement, Comment):
        line = f"{INDENT * depth}# {statement.text}"
        return [line + " " + "-" * (WIDTH - len(line) - 1) if statement.rule else clip(line, WIDTH)]
    if isinstance(statement, Block):
        return [*layout(statement.head, depth), *text_of(statement.body, depth + 1)]
    return [line and INDENT * depth + line for line in statement.lines]


def _doc(value: Doc | Call) -> Doc:
    return Brackets(f"{value.function}(", value.args, ")") if isinstance(value, Call) else value


def _assign(statement: Assign, depth: int) -> list[str]:
    targets, value, left = statement.targets, _doc(statement.value), ", ".join(statement.targets)
    if not targets:
        return layout(value, depth)
    opening = len(value.head) if isinstance(value, Brackets) else 0
    # One target stands alone however long it is: in brackets it would be a tuple of one.
    if len(targets) == 1 or len(INDENT * depth + left + " = (") + opening <= WIDTH:
        return layout(prefix(f"{left} = ", value), depth)
    first, *rest = layout(prefix(") = ", value), depth)
    return [INDENT * depth + "(", *(f"{INDENT * (depth + 1)}{target}," for target in targets), first, *rest]


def _with_remark(lines: list[str], remark: str) -> list[str]:
    """The remark goes where there is one line, and room in it."""
    full = f"{lines[0]}  # {remark}" if remark and len(lines) == 1 else ""
    return [full] if full and len(full) <= WIDTH else lines


def import_blocks(modules: Iterable[str], others: Sequence[str], ours: Sequence[str]) -> list[str]:
    """The import lines of a file, in the order that isort gives them: `modules` are imported whole, the standard
    library's before the rest; after these come the lines `others` (of the rest) and `ours`, each block apart."""
    lines = {name: f"import {name}" + (" as F" if name == "torch.nn.functional" else "") for name in sorted(modules)}
    standard = [line for name, line in lines.items() if name.partition(".")[0] in sys.stdlib_module_names]
    rest = [line for line in lines.values() if line not in standard]
    blocks = [block for block in (standard, [*rest, *others], ours) if block]
    return "\n\n".join("\n".join(block) for block in blocks).split("\n")
