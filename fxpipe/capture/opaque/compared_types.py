"""Code that compares the type of a list with `list`: while a model is captured, something else stands for the list.

`isinstance(targets, list)` is answered as for the list itself; what `type(targets)` returns cannot be.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Container, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from fxpipe.capture.capture_errors import Refused
from fxpipe.capture.model_with_loss import KeptLoss
from fxpipe.capture.tracing.size_names import source_tree
from fxpipe.capture.twins.twin import Twins
from fxpipe.ir.graph.graph import Origin

from .random_names import names_in


def compared_type(twins: Twins, kept: Container[int], losses: Iterable[Any], paths: Iterable[str]) -> Refused | None:
    """The refusal of the first line that compares type(x) with list, where x is named like a list of samples at
    `paths`: in the classes of the model's submodules, except those kept whole (`kept`, by id); or, whatever x is named,
    in the `losses`, which have names of their own. None if there is no such line."""
    names = {name for path in paths for name in _names(path)}
    skipped = "\0"  # begins no path
    for path, twin in twins.named():
        if f"{path}.".startswith(skipped):
            continue
        original = twins.original(twin)
        if id(twin) in kept:
            skipped = f"{path}." if path else ""
        elif found := _of_loss(original.loss_fn) if isinstance(original, KeptLoss) else _of_class(original, names):
            around = [id(one) for at, one in twins.named() if not at or f"{path}.".startswith(f"{at}.")]
            return _refused(*found, modules=around)
    found = next(filter(None, map(_of_loss, losses)), None)
    return _refused(*found, modules=[]) if found else None


def _of_class(module: Any, names: Container[str]) -> tuple[str, Origin] | None:
    """The first comparison in the methods of a module, of what has one of these names."""
    return next((one for kind in type(module).__mro__ for one in _in_methods(kind) if one[0] in names), None)


def _of_loss(loss: Any) -> tuple[str, Origin] | None:
    """The first comparison in a loss function."""
    while isinstance(loss, partial):
        loss = loss.func
    if isinstance(loss, MethodType):
        loss = loss.__func__
    if isinstance(loss, FunctionType):
        return next(_compared(loss.__code__), None)
    return next((one for kind in type(loss).__mro__ for one in _in_methods(kind)), None)


def _refused(name: str, where: Origin, modules: list[int]) -> Refused:
    reason = "it compares the type of a list whose items are the samples, and something else stands for that list"
    return Refused(where, reason, f"write isinstance({name}, list)", modules)


def _in_methods(kind: type) -> Iterator[tuple[str, Origin]]:
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            yield from _compared(method.__code__)


def _compared(code: CodeType) -> Iterator[tuple[str, Origin]]:
    """The comparisons in code, each with the last name in what the type is taken of."""
    tree = source_tree(code) if {"type", "list"} <= names_in(code) else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Compare) and "list" in _names(ast.unparse(node)):
            for part in (node.left, *node.comparators):
                if isinstance(part, ast.Call) and ast.unparse(part.func) == "type" and len(part.args) == 1:
                    file, line = code.co_filename, code.co_firstlineno + node.lineno - 1
                    where = Origin(file, line, linecache.getline(file, line).strip(), "")
                    yield from ((name, where) for name in _names(ast.unparse(part.args[0]))[-1:])


def _names(text: str) -> list[str]:
    """The names of variables, attributes and keys.

    >>> _names("type(self.batch['targets']) in (list, tuple)")
    ['type', 'self', 'batch', 'targets', 'in', 'list', 'tuple']
    """
    return re.findall(r"[^\W\d]\w*", text)
