"""Names for the values of a graph: the user's own where there are any; identifiers, each used once."""

from __future__ import annotations

import ast
import inspect
import keyword
import re
import textwrap
from collections.abc import Callable, Iterable
from tokenize import TokenError
from types import CodeType
from typing import Any

from fxpipe.ir.graph.value_types import TensorType

# Names that generated code needs for itself. Of the builtins only those: `input` is what many call their argument.
OURS = ("F", "Tensor", "draw", "math", "nn", "operator", "self", "torch")
BUILTINS = ("bool", "complex", "dict", "float", "int", "len", "list", "max", "min", "range", "slice", "super", "tuple")
RESERVED = frozenset((*OURS, *BUILTINS, *keyword.kwlist, *keyword.softkwlist))


class Names:
    """Gives every name once.

    >>> names = Names()
    >>> names("batch['ids']"), names("encoder.0.weight"), names("lambda"), names("lambda"), names("0.bias")
    ('batch_ids', 'encoder_0_weight', 'lambda_', 'lambda_1', 'layer_0_bias')
    >>> names("x"), names("x"), names("x_1")
    ('x', 'x_1', 'x_2')
    """

    def __init__(self, used: Iterable[str] = ()) -> None:
        self.used = set(used)
        self.numbers: dict[str, int] = {}

    def __call__(self, wish: str) -> str:
        name = re.sub(r"\W+", "_", wish).strip("_") or "value"
        if name[0].isdigit():
            name = f"layer_{name}" if "." in wish else f"value_{name}"
        free = f"{name}_" if name in RESERVED else name
        base = re.sub(r"_\d+$", "", name)
        while free in self.used:
            self.numbers[base] = self.numbers.get(base, 0) + 1
            free = f"{base}_{self.numbers[base]}"
        self.used.add(free)
        return free


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
