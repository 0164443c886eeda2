"""Every statement of ours that orders streams, and what runs without one of them.

The list is read from the source, so a statement that is new is on it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import fxpipe

ORDERING = ("wait_stream", "record_stream", "synchronize")
ROOT = Path(fxpipe.__file__).parent


class Statement(NamedTuple):
    """A call of one of ORDERING: the module and line, the path of the function that it stands in, its text."""

    module: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('fxpipe.')}:{self.function}: {self.text}"


@cache
def statements() -> tuple[Statement, ...]:
    """All of them, but for those over ranks, which need several processes."""
    found: list[Statement] = []
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "ranks" not in path.parts and any(name in text for name in ORDERING):
            module = ".".join(("fxpipe", *path.relative_to(ROOT).with_suffix("").parts))
            found += [Statement(module, *rest) for rest in in_tree(ast.parse(text), ())]
    return tuple(found)


def in_tree(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from in_tree(child, (*scope, child.name))
        elif orders(child):
            yield child.lineno, ".".join(scope), ast.unparse(child)
        else:
            yield from in_tree(child, scope)


def orders(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    called = node.value.func
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in ORDERING


class Without(ast.NodeTransformer):
    """Puts `pass` in the place of the statement of a line."""

    def __init__(self, line: int) -> None:
        self.line = line

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node) if orders(node) and node.lineno == self.line else node


@contextmanager
def removed(statement: Statement) -> Iterator[None]:
    """In this context the function does without the statement."""
    module: Any = importlib.import_module(statement.module)
    function = module
    for name in statement.function.split("."):
        function = getattr(function, name)
    tree = Without(statement.line).visit(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
    own = function.__code__
    function.__code__ = code_of(compile(tree, module.__file__, "exec", dont_inherit=True), own)
    try:
        yield
    finally:
        function.__code__ = own


def code_of(code: CodeType, like: CodeType) -> CodeType:
    """The code of the same function in another version of its file."""
    found = list(codes(code))
    return next(one for one in found if one.co_qualname == like.co_qualname)


def codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)
