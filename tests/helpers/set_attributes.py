"""What code sets on objects, and of which of its own classes these are, read from syntax trees.

Types come from annotations, and from what code calls, sets and iterates over. A name has all types that it has anywhere
in its function. What is of no known type, as the `ctx` of an autograd function, is of no class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

MAKERS = ("__init__", "__new__", "__post_init__", "__copy__", "__deepcopy__")  # the methods that make an object
ON_CLASSES = {"staticmethod", "classmethod", "__new__", "__init_subclass__", "__class_getitem__"}  # have no `self`
FIELDS = ("NamedTuple", "TypedDict", "Protocol")  # bases of classes whose annotations are fields
DEEP = 16  # of types that are known by others: there are circles
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Value(NamedTuple):
    """What is known of a value in a scope: its annotation, or an expression that makes it."""

    scope: Scope
    node: ast.expr
    annotated: bool = False

    def kinds(self, depth: int, item: bool = False) -> set[Scope]:
        """The classes that the value may be of; or its items."""
        if self.annotated:
            return self.scope.named(self.node, item)
        return self.scope.items(self.node, depth + 1) if item else self.scope.kinds(self.node, depth + 1)


class Setting(NamedTuple):
    """An attribute that is set, or deleted if `value` is None. `name`: None if the code computes it."""

    target: ast.expr
    name: str | None
    value: Value | None
    line: int


class Scope:
    """What a module, a class or a function defines.

    - `classes`, `functions`: the scopes in it; `imports`: the module and name of each imported name.
    - `values`: by name; `settings`: of attributes.
    """

    def __init__(
        self, module: str, node: ast.Module | ast.ClassDef | Function, above: Scope | None, sources: Sources
    ) -> None:
        self.module, self.node, self.above, self.sources = module, node, above, sources
        self.classes: dict[str, Scope] = {}
        self.functions: dict[str, Scope] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self.values: dict[str, list[Value]] = {}
        self.settings: list[Setting] = []
        if isinstance(node, Function):
            self._take(node)
        for statement in node.body:
            self._read(statement)

    @property
    def name(self) -> str:
        return self.module if isinstance(self.node, ast.Module) else f"{self.module}.{self.node.name}"

    def scopes(self) -> Iterator[Scope]:
        """This one, and those in it."""
        yield self
        for one in [*self.classes.values(), *self.functions.values()]:
            yield from one.scopes()

    # What code says ---------------------------------------------------------------------------------------------------

    def _take(self, node: Function) -> None:
        """Note the types of a function's arguments."""
        taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in taken:
            if argument.annotation is not None:
                self._hold(argument.arg, Value(self, argument.annotation, True))
        marks = {node.name, *map(ast.unparse, node.decorator_list)}
        if (owner := self.above) is not None and isinstance(owner.node, ast.ClassDef) and not marks & ON_CLASSES:
            self._hold(taken[0].arg, Value(owner.above or owner, ast.Name(owner.node.name), True))

    def _hold(self, name: str, value: Value) -> None:
        self.values.setdefault(name, []).append(value)

    def _read(self, node: ast.AST) -> None:
        """Note what a statement or an expression defines and sets, and all that is in it."""
        match node:
            case ast.ClassDef():
                self.classes[node.name] = Scope(self.module, node, self, self.sources)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[node.name] = Scope(self.module, node, self, self.sources)
                return
            case ast.ImportFrom():
                package = self.module.split(".")
                parts = package[: len(package) - node.level + (self.module in self.sources.packages)]
                base = ".".join([*(parts if node.level else []), *([node.module] if node.module else [])])
                self.imports |= {alias.asname or alias.name: (base, alias.name) for alias in node.names}
            case ast.Assign():
                for target in node.targets:
                    self._set(target, Value(self, node.value))
            case ast.AnnAssign() if isinstance(node.target, ast.Name) or node.value is not None:
                self._set(node.target, Value(self, node.annotation, True))
            case ast.AugAssign() | ast.NamedExpr():
                self._set(node.target, Value(self, node.value))
            case ast.For() | ast.comprehension():
                self._set(node.target, Value(self, ast.Subscript(node.iter, ast.Constant(0))))
            case ast.withitem(optional_vars=ast.expr() as target):
                self._set(target, Value(self, node.context_expr))
            case ast.Delete():
                self.settings += [
                    Setting(one.value, one.attr, None, one.lineno)
                    for one in node.targets
                    if isinstance(one, ast.Attribute)
                ]
            case ast.Call(ast.Name("setattr") | ast.Attribute(_, "__setattr__"), [target, name, value]):
                self._set_by_name(target, name, Value(self, value))
            case ast.Call(
                ast.Attribute(ast.Attribute(target, "__dict__") | ast.Call(ast.Name("vars"), [target]), "update"),
                [value],
            ):
                self._set_by_name(target, None, Value(self, value))
        for child in ast.iter_child_nodes(node):
            self._read(child)

    def _set(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name():
                self._hold(target.id, value)
            case ast.Attribute():
                self.settings.append(Setting(target.value, target.attr, value, target.lineno))
            case ast.Subscript(ast.Attribute(of, "__dict__") | ast.Call(ast.Name("vars"), [of]), name):
                self._set_by_name(of, name, value)
            case ast.Tuple(elts) | ast.List(elts):
                several = getattr(value.node, "elts", ())
                same = len(several) == len(elts)
                for place, one in enumerate(elts):
                    one = one.value if isinstance(one, ast.Starred) else one
                    self._set(one, Value(self, several[place] if same else ast.Constant(None)))

    def _set_by_name(self, target: ast.expr, name: ast.expr | None, value: Value) -> None:
        found = name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
        self.settings.append(Setting(target, found, value, target.lineno))

    # Types ------------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Scope | list[Value]:
        """The class or the function of this name, else what is known of its values."""
        if not isinstance(self.node, ast.ClassDef):  # methods do not see the names of their class
            if (found := self.classes.get(name) or self.functions.get(name)) is not None:
                return found
            if name in self.values:
                return self.values[name]
            if name in self.imports:
                base, last = self.imports[name]
                return self.sources.modules[base].find(last) if base in self.sources.modules else []
        return self.above.find(name) if self.above is not None else []

    def kinds(self, node: ast.expr, depth: int = 0) -> set[Scope]:
        """The classes that the value of an expression may be of."""
        deeper = depth + 1
        match node:
            case _ if depth > DEEP:
                return set()
            case ast.Name() | ast.Attribute():
                return self.held(node, deeper, items=False)
            case ast.Subscript():
                return self.items(node.value, deeper)
            case ast.IfExp():
                return self.kinds(node.body, deeper) | self.kinds(node.orelse, deeper)
            case ast.BoolOp():
                return {kind for value in node.values for kind in self.kinds(value, deeper)}
            case ast.NamedExpr():
                return self.kinds(node.value, deeper)
            case ast.Call(ast.Attribute(_, "__new__"), [first, *_]):
                return self.called(first, deeper)[0]
            case ast.Call(ast.Name("replace" | "copy"), [first, *_]):
                return self.kinds(first, deeper)
            case ast.Call():
                return self.called(node.func, deeper)[0]
        return set()

    def items(self, node: ast.expr, depth: int = 0) -> set[Scope]:
        """The classes that the items of an expression's value may be of."""
        deeper = depth + 1
        match node:
            case _ if depth > DEEP:
                return set()
            case ast.Name() | ast.Attribute():
                return self.held(node, deeper, items=True)
            case ast.List() | ast.Tuple() | ast.Set():
                return {kind for value in node.elts for kind in self.kinds(value, deeper)}
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self.kinds(node.elt, deeper)
            case ast.DictComp():
                return self.kinds(node.value, deeper)
            case ast.Call(ast.Name("tuple" | "list" | "sorted" | "reversed" | "set"), [first, *_]):
                return self.items(first, deeper)
            case ast.Call(ast.Attribute(value, "values")):
                return self.items(value, deeper)
            case ast.Call():
                return self.called(node.func, deeper)[1]
        return set()

    def held(self, node: ast.Name | ast.Attribute, depth: int, items: bool) -> set[Scope]:
        """The classes that what a variable or an attribute holds may be of, or the `items` of that."""
        if isinstance(node, ast.Attribute):
            return {kind for one in self.kinds(node.value, depth) for kind in one.attribute(node.attr, depth, items)}
        found = self.find(node.id)
        return set() if isinstance(found, Scope) else {kind for one in found for kind in one.kinds(depth, items)}

    def called(self, node: ast.expr, depth: int) -> tuple[set[Scope], set[Scope]]:
        """The classes that what a call returns may be of, and those of its items."""
        match node:
            case ast.Name("cls") if self.above is not None and isinstance(self.above.node, ast.ClassDef):
                found = [self.above]
            case ast.Name():
                one = self.find(node.id)
                found = [one] if isinstance(one, Scope) else []
            case ast.Attribute():
                owners = self.kinds(node.value, depth)
                found = [one.methods[node.attr] for one in owners if node.attr in one.methods]
            case ast.Call(ast.Name("type"), [value]):
                return self.kinds(value, depth), set()
            case _:
                found = []
        made = {one for one in found if isinstance(one.node, ast.ClassDef)}
        given = [(one, one.node.returns) for one in found if isinstance(one.node, Function) and one.node.returns]
        made |= {kind for one, returns in given for kind in one.named(returns)}
        return made, {kind for one, returns in given for kind in one.named(returns, True)}

    def named(self, node: ast.expr, item: bool = False) -> set[Scope]:
        """The classes in an annotation; or those of the items, in its brackets."""
        match node:
            case ast.Constant(str()):
                return self.named(ast.parse(node.value, mode="eval").body, item)
            case ast.BinOp():
                return self.named(node.left, item) | self.named(node.right, item)
            case ast.Subscript() if item:
                inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                return {kind for one in inner for kind in self.named(one)}
            case ast.Name() if not item:
                found = self.find(node.id)
                return {found} if isinstance(found, Scope) and isinstance(found.node, ast.ClassDef) else set()
        return set()

    # Classes ----------------------------------------------------------------------------------------------------------

    @cached_property
    def line(self) -> list[Scope]:
        """The class, and those above it."""
        bases = [one.value if isinstance(one, ast.Subscript) else one for one in getattr(self.node, "bases", ())]
        return [self, *(one for base in bases for found in (self.above or self).named(base) for one in found.line)]

    @cached_property
    def methods(self) -> Mapping[str, Scope]:
        return {name: method for one in reversed(self.line) for name, method in one.functions.items()}

    @cached_property
    def marks(self) -> str:
        """The decorators and bases of a class."""
        return " ".join(map(ast.unparse, [*getattr(self.node, "decorator_list", ()), *getattr(self.node, "bases", ())]))

    @property
    def frozen(self) -> bool:
        return any("dataclass" in one.marks and "frozen=True" in one.marks for one in self.line)

    def attribute(self, name: str, depth: int, item: bool = False) -> set[Scope]:
        """The classes that an attribute of an object of this class may be of."""
        found = [value for one in self.line for value in one.values.get(name, ()) if value.annotated]
        found += self.made.get(name, [])
        method = self.methods[name].node if name in self.methods else None
        marks = map(ast.unparse, method.decorator_list) if isinstance(method, Function) else ()
        if not found and method is not None and method.returns and any(mark.endswith("property") for mark in marks):
            found = [Value(self.methods[name], method.returns, True)]
        return {kind for value in found for kind in value.kinds(depth, item)}

    @cached_property
    def made(self) -> Mapping[str, list[Value]]:
        """What an object of this class has once it is made: its fields, and what its makers set, with what is known of
        the values. Where these compute names, it has all that the class declares."""
        found: dict[str, list[Value]] = {}
        declared = [name for one in self.line for name in one.values]
        for one in self.line:
            if "dataclass" in one.marks or any(base in one.marks for base in FIELDS):
                found |= {name: [] for name in one.values}
            for maker in [one.functions[name] for name in MAKERS if name in one.functions]:
                assert isinstance(maker.node, Function)
                own = None if maker.node.name == "__new__" else maker.node.args.args[0].arg
                for target, name, value, _ in maker.settings:
                    if isinstance(target, ast.Name) and own in (None, target.id):
                        for each in declared if name is None else [name]:
                            found.setdefault(each, []).extend([value] if value else [])
        return found


class Sources:
    """The scopes of modules, by name. `packages`: those of them that are packages."""

    def __init__(self, texts: Mapping[str, str], packages: frozenset[str] = frozenset()) -> None:
        self.packages = packages
        self.modules: dict[str, Scope] = {}
        self.modules |= {name: Scope(name, ast.parse(text), None, self) for name, text in texts.items()}
