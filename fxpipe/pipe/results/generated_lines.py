"""The generated code in pieces, each beside the user's line that it was made of.

    unet.py:41                                       max_pool2d = F.max_pool2d(skip3, 2)
    x = self.middle(F.max_pool2d(skip3, 2))

Generated code has a comment above each piece, with a file, a line and its text as far as there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxpipe.codegen.stage.stage_body import place
from fxpipe.codegen.text.source_names import code_comment
from fxpipe.ir.graph.graph import Graph, Origin

Origins = Mapping[str, Iterable[Origin]]  # by their place, as comments name it


def origins(graph: Graph) -> Origins:
    """The lines that the ops of a graph come from."""
    found: dict[str, dict[tuple[str, str], Origin]] = {}
    for op in (*graph.ops, *(graph.totals.ops if graph.totals else ())):
        found.setdefault(place(op.origin), {})[op.origin.file, op.origin.code] = op.origin
    return {name: tuple(lines.values()) for name, lines in found.items() if name}


def pieces(text: str, known: Origins) -> list[tuple[str, str]]:
    """The pieces of a generated file: what stands to the left, empty where nothing is known, and the code. The comments
    that are to the left are not in the code; all other lines are."""
    found: list[tuple[str, list[str]]] = [("", [])]
    depth = 0
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        left = _left(line.strip()[2:], known) if line.lstrip().startswith("# ") else ""
        if left:
            found.append((left, []))
            depth = indent
        elif line.strip() and indent < depth:  # the end of the function, or of a block
            found.append(("", [line]))
            depth = 0
        else:
            found[-1][1].append(line)
    return [(left, code) for left, lines in found if (code := "\n".join(lines).strip("\n")) or left]


def _left(comment: str, known: Origins) -> str:
    """What a comment says, with the whole line of the user's; empty if it is about no line, or about several."""
    head, *rest = comment.split("  ")
    lines = list(known.get(head.rpartition(" ")[2], ()))
    if rest and len(lines) > 1:
        lines = [one for one in lines if code_comment(one.code).startswith(rest[-1].removesuffix(" ..."))]
    if len(lines) != 1:
        return ""
    code = lines[0].code
    if rest and code_comment(code).startswith(rest[-1].removesuffix(" ...")):
        rest.pop()
    return "\n".join(("  ".join((head, *rest)), code)).rstrip()
