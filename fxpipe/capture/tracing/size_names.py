"""What the sizes of inputs are called: as the user's own forward calls them, else as is usual."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from tokenize import TokenError
from types import CodeType
from typing import Any

from fxpipe.ir.graph.value_types import TensorType


def source_tree(function: Callable[..., Any] | CodeType) -> ast.Module | None:
    """The syntax tree of a function; None if there is no source, or one that does not parse by itself."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError, TokenError):
        return None


def named_sizes(forward: Callable[..., Any]) -> dict[tuple[str, int], str]:
    """What a forward calls the sizes of its arguments, as in `b, t = x.shape` or `t = x.size(1)`: by argument and
    dimension."""
    tree = source_tree(forward)
    found: dict[tuple[str, int], str] = {}
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            target, value = node.targets[0], ast.unparse(node.value)
            one = re.fullmatch(r"(.+)\.(?:shape\[(\d+)\]|size\((\d+)\))", value)
            all_ = re.fullmatch(r"(.+)\.(?:shape|size\(\))(?:\[:\d+\])?", value)
            if one and isinstance(target, ast.Name):
                found.setdefault((one[1], int(one[2] or one[3])), target.id)
            elif all_ and isinstance(target, ast.Tuple):
                for dim, item in enumerate(target.elts):
                    if isinstance(item, ast.Name) and not item.id.startswith("_"):
                        found.setdefault((all_[1], dim), item.id)
    return found


def usual_size(kind: TensorType, dim: int) -> str | None:
    """What a size is mostly called that varies beside the batch: of texts and sequences of vectors, and of images.

    >>> usual_size(TensorType("i64", ("b", "s1"), "cpu"), 1), usual_size(TensorType("f32", ("b", 3, 8, "s1"), "cpu"), 3)
    ('seq', 'width')
    """
    rank, whole = len(kind.shape), kind.dtype.startswith(("i", "u", "bool"))
    if dim == 1 and ((rank == 2 and whole) or (rank == 3 and isinstance(kind.shape[2], int))):
        return "seq"
    return {2: "height", 3: "width"}.get(dim) if rank == 4 else None
