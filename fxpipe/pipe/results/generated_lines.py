"""The generated code in pieces, each beside the user's line that it was made of.

    unet.py:41                                       max_pool2d = F.max_pool2d(skip3, 2)
    x = self.middle(F.max_pool2d(skip3, 2))

Generated code has a comment above each piece, with a file, a line and its text as far as there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fxpipe.codegen.stage.stage_body import place
from fxpipe.codegen.text.source_names import code_comment
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import Opaque

Lines = Mapping[str, Collection[str]]  # the user's lines, by their place as comments name it


def user_lines(graph: Graph) -> Lines:
    """The lines that the ops of a graph come from, and those for which submodules are kept whole. Files of one name may
    have several at a place."""
    found: dict[str, set[str]] = {}
    for op in (op for part in (graph, graph.totals, graph.epilogue) if part for op in part.ops):
        for origin in (op.origin, *([op.target.origin] if isinstance(op.target, Opaque) else ())):
            found.setdefault(place(origin), set()).add(origin.code)
    return found


def pieces(text: str, known: Lines) -> list[tuple[str, str]]:
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


def _left(comment: str, known: Lines) -> str:
    """What a comment says, with the whole line of the user's; empty if it is about no line, or about several."""
    head, *rest = comment.split("  ")
    lines = known.get(head.rpartition(" ")[2], ())
    told = [line for line in lines if rest and code_comment(line).startswith(rest[-1].removesuffix(" ..."))]
    if len(told or lines) != 1:
        return ""
    (line,) = told or lines
    return "\n".join(("  ".join((head, *rest[: -1 if told else None])), line)).rstrip()
