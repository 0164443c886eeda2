"""Cuts a method of a stage, its forward or a part of its backward, into pieces that a compiler can compile whole.

    def forward(self, x, draw):                          def forward(self, x, draw):
        h = F.linear(x, self.fc.weight)                      h = piece_3(x, self.fc.weight)
        with draw(0):                             ──▶        with draw(0):
            h = F.dropout(h, 0.1)                                h = F.dropout(h, 0.1)
        y = F.relu(h)                                        return piece_6(h)
        return y

These ops stay outside of the pieces:

- random ops: their generator is seeded under a lock, op by op, and a compiler may reorder ops or draws;
- the user's autograd functions, which Dynamo does not read a second time;
- functions with Python state, such as deferred batch norm, and checks;
- submodules that are called whole;
- the list of what forward keeps, which backward unpacks and empties.

Gradients of weights are returned, not added up: a piece writes into no sum.

The pieces are functions of tensors and numbers alone, so a compiler sees neither the stage, nor that its tensors are
replaced in each step. All lines keep their numbers: the traceback of an error in a piece has the line of the stage's
file.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from fxpipe.codegen.text.op_text import EmitError
from fxpipe.codegen.text.source_names import STAGE_NAMES

WORK = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign)


def cut(method: ast.FunctionDef, held: Collection[str], eager: Collection[str]) -> list[ast.FunctionDef]:
    """The pieces, each named by its first line, such as `piece_12`; then the new method, which calls them. `held`: the
    names and paths of the stage's tensors and modules. `eager`: functions, and paths of submodules, whose calls stay in
    the method. Raises EmitError if a method (edited by the user) branches."""
    return _Cut(method, frozenset(held), frozenset(eager)).functions()


class _Cut:
    """One cut under way. `pieces` are made from the last to the first, as a piece must return the variables that are
    read after it."""

    def __init__(self, method: ast.FunctionDef, held: frozenset[str], eager: frozenset[str]) -> None:
        for node in ast.walk(method):
            if isinstance(node, (ast.If, ast.For, ast.While, ast.Try)):
                raise EmitError(f"line {node.lineno} branches, and only straight lines are compiled")
        self.method, self.held, self.eager = _Inline(held).visit(_NotAdded().visit(method)), held, eager
        arguments = {argument.arg for argument in method.args.args} - {"self"}
        self.locals = arguments | _names(method, ast.Store)
        annotations = {argument.arg: argument.annotation for argument in method.args.args}
        self.lists = {name for name, kind in annotations.items() if kind and ast.unparse(kind).startswith("list[")}
        self.pieces: list[ast.FunctionDef] = []

    def functions(self) -> list[ast.FunctionDef]:
        self.method.body = self.block(self.method.body, frozenset())
        self.method.returns = None
        for argument in self.method.args.args:
            argument.annotation = None
        return [ast.fix_missing_locations(function) for function in (*reversed(self.pieces), self.method)]

    def block(self, body: Sequence[ast.stmt], live: frozenset[str]) -> list[ast.stmt]:
        """The statements, with runs of them replaced by calls of pieces. `live`: the variables read afterwards."""
        found: list[ast.stmt] = []
        for stays, group in reversed([(stays, list(group)) for stays, group in groupby(body, self.stays)]):
            for statements in reversed([[statement] for statement in group]) if stays else [group]:
                found = [*self.replaced(statements, live, stays), *found]
                live = self.live_before(statements, live)
        return found

    def replaced(self, statements: list[ast.stmt], live: frozenset[str], stays: bool) -> list[ast.stmt]:
        first = statements[0]
        if isinstance(first, ast.With) and stays and not _draws(first):  # autocast, say, around ops that stay
            return [ast.With(items=first.items, body=self.block(first.body, live), lineno=first.lineno)]
        if stays or not any(isinstance(node, WORK) for statement in statements for node in ast.walk(statement)):
            return statements
        return self.call(statements, live)

    def stays(self, statement: ast.stmt) -> bool:
        """Whether the statement must stay outside of pieces."""
        nodes = list(ast.walk(statement))
        calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        paths = {".".join(_path(node) or ()) for node in nodes if isinstance(node, ast.expr)}
        own_functions = any(isinstance(node, ast.Attribute) and node.attr == "higher_order" for node in nodes)
        own_functions = own_functions or any(isinstance(node, ast.Name) and node.id in self.lists for node in nodes)
        return own_functions or not self.eager.isdisjoint(calls | paths) or any(map(_draws, nodes))

    def call(self, statements: list[ast.stmt], live: frozenset[str]) -> list[ast.stmt]:
        """The call of a new piece, and the deletion of variables that only the piece needed."""
        hoist = _Hoist(self.held, self.locals)
        body = [hoist.visit(copy.deepcopy(statement)) for statement in statements]
        needed, written = sorted(self.live_before(body, frozenset())), _names_in(body, ast.Store)
        given, returns = sorted(written & live), isinstance(body[-1], ast.Return)
        if given:
            body.append(ast.Return(_tuple(given, ast.Load())))
        name = f"piece_{statements[0].lineno}"
        names = [ast.arg(name) for name in (*needed, *hoist.held)]
        piece = ast.FunctionDef(name, ast.arguments([], names, None, [], [], None, []), body, [])
        self.pieces.append(ast.copy_location(piece, statements[0]))
        own = list(hoist.held.values())
        call = ast.Call(ast.Name(name, ast.Load()), [*(ast.Name(name, ast.Load()) for name in needed), *own], [])
        made: list[ast.stmt] = [ast.Return(call) if returns else _assign(given, call)]
        gone = ({*needed} | _names_in(statements, ast.Del) - written) - live - {*given}
        if gone and not returns:
            made.append(ast.Delete([ast.Name(name, ast.Del()) for name in sorted(gone)]))
        # Not at a line of the model: an error in a piece has its own line.
        return [ast.copy_location(statement, self.method) for statement in made]

    def live_before(self, statements: Sequence[ast.stmt], live: frozenset[str]) -> frozenset[str]:
        """The variables set earlier that the statements read, or that are `live` after them."""
        for statement in reversed(list(_flat(statements))):
            read = _names(statement, ast.Load) | _names(statement, ast.Del)
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                read |= {statement.target.id}
            live = (live - _names(statement, ast.Store)) | (read & self.locals)
        return live


class _NotAdded(ast.NodeTransformer):
    """Replaces `accumulate(sums[0], gradient)` by the gradient: whoever calls the method adds it."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "accumulate":
            return node.args[1]
        if name == "accumulate_mm":
            node.func = ast.copy_location(ast.Attribute(ast.Name("torch", ast.Load()), "mm", ast.Load()), node)
            del node.args[0]
        return node


class _Inline(ast.NodeTransformer):
    """Replaces variables that hold modules of the model by their paths: a piece cannot take a module."""

    def __init__(self, paths: frozenset[str]) -> None:
        self.paths = paths
        self.modules: dict[str, ast.expr] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        path, target = _path(node.value), node.targets[0]
        within = ".".join(path or ()) + "."
        if path and isinstance(target, ast.Name) and any(known.startswith(within) for known in self.paths):
            self.modules[target.id] = node.value
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.modules.get(node.id, node))


class _Hoist(ast.NodeTransformer):
    """Replaces tensors of the stage by names; `held`: the expressions, by name."""

    def __init__(self, paths: frozenset[str], taken: Collection[str]) -> None:
        self.paths, self.taken = paths, taken
        self.held: dict[str, ast.expr] = {}

    def visit_Delete(self, node: ast.Delete) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)  # a compiler knows when a tensor is not needed any more

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self.hoisted(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self.hoisted(node)

    def hoisted(self, node: ast.Attribute | ast.Subscript) -> ast.expr:
        path = _path(node)
        if path is None or ".".join(path) not in self.paths:
            self.generic_visit(node)
            return node
        name = next((name for name, known in self.held.items() if _path(known) == path), "")
        if not name:
            name = "own_" + "".join(char if f"v{char}".isidentifier() else "_" for char in "_".join(filter(None, path)))
            while name in self.taken or name in self.held:
                name += "_"
            self.held[name] = copy.deepcopy(node)
        return ast.copy_location(ast.Name(name, ast.Load()), node)


def _path(node: ast.expr) -> list[str] | None:
    """The parts of `self.layers[0].weight`. An attribute of the stage's own, `self.device`, begins with an empty part:
    `self["device"]` is the model's."""
    if isinstance(node, ast.Name):
        return [] if node.id == "self" else None
    if isinstance(node, ast.Attribute):
        owner, last = _path(node.value), node.attr
        if owner == [] and last in STAGE_NAMES:
            return ["", last]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner, last = _path(node.value), str(node.slice.value)
    else:
        return None
    return None if owner is None else [*owner, last]


def _assign(names: Sequence[str], value: ast.expr) -> ast.stmt:
    return ast.Assign([_tuple(names, ast.Store())], value) if names else ast.Expr(value)


def _tuple(names: Sequence[str], context: ast.expr_context) -> ast.expr:
    """The name, or a tuple of several."""
    parts: list[ast.expr] = [ast.Name(name, context) for name in names]
    return parts[0] if len(parts) == 1 else ast.Tuple(parts, context)


def _draws(node: ast.AST) -> bool:
    """`with draw(k):`"""
    if not isinstance(node, ast.With):
        return False
    made = node.items[0].context_expr
    return isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == "draw"


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """The statements in the order in which they run; for a `with`, its context expressions and then its body."""
    for statement in statements:
        if isinstance(statement, ast.With):
            yield from statement.items
            yield from _flat(statement.body)
        else:
            yield statement


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def _names_in(statements: Sequence[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    return {name for statement in statements for name in _names(statement, context)}
