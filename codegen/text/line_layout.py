"""Statements laid out in lines of at most 110 characters, as a formatter would.

Generated files are read, edited and committed by people, so they should survive `ruff format` unchanged. fx prints one
endless line per op; calling a formatter would make it a dependency. The statements of a stage are simple (an atom, an
infix expression, nested brackets), and for those the formatter's rules fit on this page:

    conv = F.conv2d(image, self.conv.weight)        flat, if it fits;

    conv = F.conv2d(                                else the arguments in one line of their own,
        image, self.down.conv.weight, padding=1
    )
    x = torch.cat(                                  else one per line, each by these same rules.
        [
            image,
            skip,
        ],
        dim=1,
    )
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

WIDTH = 110
INDENT = "    "


@dataclass(frozen=True)
class Brackets:
    """`head` with its opening bracket, items, `tail` with its closing one. `kind` says how it breaks:

    "call": all items in one line of their own, else one per line; "literal": one per line at once; "bare": a tuple
    without parentheses, which gets them when it breaks; "index": one item, never followed by a comma.
    """

    head: str
    items: tuple[Doc, ...]
    tail: str
    kind: Literal["call", "literal", "bare", "index"] = "call"


@dataclass(frozen=True)
class Infix:
    """`left op right`; breaks before the operator, in parentheses."""

    left: str
    op: str
    right: str
    head: str = ""


Doc = str | Brackets | Infix


def flat(doc: Doc) -> str:
    """The text in one line."""
    if isinstance(doc, str):
        return doc
    if isinstance(doc, Infix):
        return f"{doc.head}{doc.left}{doc.op}{doc.right}"
    inner = ", ".join(map(flat, doc.items))
    comma = "," if doc.kind in ("literal", "bare") and len(doc.items) == 1 and _is_tuple(doc) else ""
    return f"{doc.head}{inner}{comma}{doc.tail}"


def _is_tuple(doc: Brackets) -> bool:
    return doc.kind == "literal" and doc.tail == ")" and doc.head.endswith("(")


def prefix(text: str, doc: Doc) -> Doc:
    """The doc with text before it: `x = `, `padding=`."""
    return text + doc if isinstance(doc, str) else replace(doc, head=text + doc.head)


def layout(doc: Doc, depth: int = 0, end: str = "") -> list[str]:
    """The lines of a statement, indented by `depth` steps; `end` follows it on its last line."""
    indent = INDENT * depth
    line = indent + flat(doc) + end
    if len(line) <= WIDTH:
        return [line]
    if isinstance(doc, Infix):
        return _break_infix(doc, depth, end)
    if isinstance(doc, str):
        return _break_text(doc, depth, end)
    if not doc.items:
        return [line]
    opening, closing = ("(", ")") if doc.kind == "bare" else ("", "")
    inner = INDENT * (depth + 1) + ", ".join(map(flat, doc.items))
    in_one_line = doc.kind == "call" and len(inner) <= WIDTH
    body = [inner] if in_one_line else _items(doc, depth + 1)
    return [f"{indent}{doc.head}{opening}", *body, f"{indent}{closing}{doc.tail}{end}"]


def _items(doc: Brackets, depth: int) -> list[str]:
    if doc.kind == "index":
        return [INDENT * depth + flat(doc.items[0])]
    return [line for item in doc.items for line in layout(item, depth, ",")]


def _break_infix(doc: Infix, depth: int, end: str) -> list[str]:
    indent, inner = INDENT * depth, INDENT * (depth + 1)
    whole = f"{inner}{doc.left}{doc.op}{doc.right}"
    if len(whole) <= WIDTH:
        return [f"{indent}{doc.head}(", whole, f"{indent}){end}"]
    return [f"{indent}{doc.head}(", inner + doc.left, f"{inner}{doc.op.strip()} {doc.right}", f"{indent}){end}"]


def _break_text(text: str, depth: int, end: str) -> list[str]:
    """A name or literal after `x = ` that is too long goes into parentheses, if that helps."""
    indent, inner = INDENT * depth, INDENT * (depth + 1)
    for sign in (" = ", " += "):
        target, found, value = text.partition(sign)
        if found and '"' not in target and len(inner + value) <= WIDTH:
            return [f"{indent}{target}{sign}(", inner + value, f"{indent}){end}"]
    return [indent + text + end]
