"""Methods and functions that a refused line is in: the model's own forward calls them, and what is kept whole may be
one of them.

    loss, parts = self.loss_function(logits, labels, self.config)      a function, which a property returns

Forward reaches a function by an attribute, a property, a partial or a global variable, which is the user's. So the twin
gets a copy of forward in which something else is called if it is this function that would be:

    loss, parts = (stand_in if self.loss_function is function else self.loss_function)(logits, labels, self.config)
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from traceback import FrameSummary
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fxpipe.capture.model_with_loss import modules_in
from fxpipe.capture.nested_values import PLAIN, TORCH
from fxpipe.capture.twins.twin import Twins
from fxpipe.ir.graph.graph import Origin
from fxpipe.ir.graph.module_parts import OfModule, closure_of, function_named, known_in

Kept = tuple["Called", Callable[..., Any]]  # what is called, and what stands in for it


@dataclass(frozen=True)
class Called:
    """A method of a module, or a function that one of its methods calls.

    - `name`: of the method, or the last one in what is called: `loss_function`.
    - `function`: None for a method; `host`: the method that calls the function; `text`: what it calls, in source.
    - `bound`: whether that is a partial of the function.
    """

    name: str
    function: Any = None
    host: str = ""
    text: str = ""
    bound: bool = False

    @property
    def changed(self) -> str:
        """The method of a twin that is another one while this is kept whole."""
        return self.host or self.name

    @property
    def code(self) -> Any:
        """That of the function; None for a method."""
        return getattr(self.function, "__code__", None)


def calls_of(module: nn.Module, frames: Sequence[FrameSummary]) -> list[Called]:
    """The methods of a module that its forward has called, and the functions that these or forward have called, among
    the calls that led to a line; innermost first."""
    forward = _code(module, "forward")
    found: list[Called] = []
    inside: FrameSummary | None = None  # the call inside, if it is not of a method
    for frame in reversed(frames):
        is_forward = forward is not None and _is_in(frame, forward)
        own = not frame.name.startswith("__") and not hasattr(nn.Module, frame.name)
        code = _code(module, frame.name) if own and frame.name not in vars(module) else None
        is_method = is_forward or (code is not None and _is_in(frame, code))
        if is_method and inside is not None:
            every = (called for _, called in _functions_in(module, frame.name, frame.lineno))
            found += [one for one in every if _is_in(inside, one.code) and _can_be_kept(module, one)][:1]
        if is_forward:
            return found
        if is_method:
            found.append(Called(frame.name))
        inside = None if is_method else frame
    return []  # something else has called them


def frames_at(module: nn.Module, where: Origin) -> list[FrameSummary]:
    """The calls that lead to a line of a module's forward, or of a method or function that forward calls itself; [] if
    it is in neither."""
    forward = _code(module, "forward")
    if forward is None:
        return []
    outer = FrameSummary(forward.co_filename, forward.co_firstlineno, "forward", lookup_line=False)
    for name in dict.fromkeys(name for kind in type(module).__mro__ for name in vars(kind)):
        code = _code(module, name)
        found = FrameSummary(where.file, where.line, name, lookup_line=False)
        if code is not None and _is_in(found, code):
            return [outer, found]
    for line, called in _functions_in(module, "forward"):
        found = FrameSummary(where.file, where.line, called.code.co_name, lookup_line=False)
        if _is_in(found, called.code):
            return [FrameSummary(outer.filename, line, "forward", lookup_line=False), found]
    return []


def put(twins: Twins, rows: Iterable[tuple[nn.Module, Called, Callable[..., Any]]]) -> None:
    """For each twin and what it calls, let a function stand in for that."""
    hosts: dict[tuple[int, str], tuple[nn.Module, list[Kept]]] = {}
    whole: set[tuple[int, str]] = set()
    for twin, called, function in rows:
        if called.function is None:
            whole.add((id(twin), called.name))
            twins.put_method(twin, function, called.name)
        else:
            hosts.setdefault((id(twin), called.host), (twin, []))[1].append((called, function))
    for (key, host), (twin, kept) in hosts.items():
        if (key, host) not in whole:
            twins.put_method(twin, _with_stand_ins(twin, host, kept), host)


def of_module(module: nn.Module, part: Any) -> OfModule | None:
    """What stands for an object among the arguments if the module has it."""
    if isinstance(part, (Tensor, list, tuple, dict, *PLAIN, *TORCH)):
        return None
    inside = dict(module.named_modules()) | vars(module)
    return next((OfModule(path) for path, one in inside.items() if one is part), None)


def one_of(held: Sequence[OfModule], module: nn.Module, part: Any) -> OfModule | None:
    """Which of these objects of the module this is; traced by Dynamo."""
    for one in held:
        if one.of(module) is part:
            return one
    return None


def _code(module: nn.Module, name: str) -> CodeType | None:
    """The code of a method, without decorators."""
    method = inspect.getattr_static(type(module), name, None)
    function = inspect.unwrap(method) if isinstance(method, FunctionType) else None
    return function.__code__ if isinstance(function, FunctionType) else None


def _is_in(frame: FrameSummary, code: CodeType) -> bool:
    return (frame.filename, frame.name) == (code.co_filename, code.co_name) and frame.lineno in set(_lines(code))


def _lines(code: CodeType) -> Iterator[int | None]:
    return (line for _, _, line in code.co_lines())


# Functions ------------------------------------------------------------------------------------------------------------


def _functions_in(module: nn.Module, host: str, line: int | None = None) -> Iterator[tuple[int, Called]]:
    """The functions that a method of the module calls, in a line or in any, with the lines."""
    method = inspect.unwrap(inspect.getattr_static(type(module), host))
    tree = _definition(method)
    for node in ast.walk(tree) if tree is not None and host not in vars(module) else ():
        if isinstance(node, ast.Call) and (line is None or node.lineno <= line <= (node.end_lineno or 0)):
            text = ast.unparse(node.func)
            names = text.split(".")
            value = _value(module, method, names) if all(map(str.isidentifier, names)) else None
            function = value.func if isinstance(value, partial) else value
            if isinstance(function, FunctionType):
                yield node.lineno, Called(names[-1], function, host, text, isinstance(value, partial))


def _can_be_kept(module: nn.Module, called: Called) -> bool:
    """Whether a function is called by a name that leads to it again, in code that can be changed, and has no parameters
    of its own."""
    again = function_named(module, called.name) is called.function and not _holds_trained(called.function)
    return again and _with_stand_ins(module, called.host, [(called, called.function)]) is not None


def _value(module: nn.Module, method: FunctionType, names: Sequence[str]) -> Any:
    """What a method calls by these names, joined by dots: an attribute of its module, or what no name of its own leads
    to; else None."""
    code, own = method.__code__, len(names) == 2 and names[0] in method.__code__.co_varnames[:1]
    with suppress(Exception):  # of a property that forward does not ask now
        value = None if names[0] in (*code.co_varnames, *code.co_cellvars) else known_in(method).get(names[0])
        return reduce(getattr, names[1:], module if own else value)
    return None


def _holds_trained(function: Any) -> bool:
    """Whether a function reaches modules, or tensors that need a gradient, which it is not given."""
    given = (function.__defaults__ or ()), (function.__kwdefaults__ or {}).values()
    held = (*closure_of(function).values(), *given[0], *given[1])
    return bool(modules_in(function)) or any(isinstance(x, Tensor) and x.requires_grad for x in held)


def _with_stand_ins(module: nn.Module, host: str, kept: Sequence[Kept]) -> MethodType | None:
    """A method that calls something else in place of functions; None if its code cannot be changed."""
    outer = inspect.getattr_static(type(module), host)
    made = _changed(inspect.unwrap(outer), kept)
    wrapped = None if made is None else _wrapped(outer, made)
    return None if wrapped is None else MethodType(wrapped, module)


def _wrapped(outer: FunctionType, made: FunctionType) -> FunctionType | None:
    """A copy of a decorated function in which the innermost one is another; None if a decorator does not hold what it
    decorates in its closure."""
    below = getattr(outer, "__wrapped__", None)
    if below is None:
        return made
    inner = _wrapped(below, made)
    holding = [name for name, value in closure_of(outer).items() if value is below]
    if inner is None or not holding:
        return None
    cells = zip(outer.__code__.co_freevars, outer.__closure__ or (), strict=True)
    copy = _like(outer, outer.__code__, tuple(CellType(inner) if name in holding else cell for name, cell in cells))
    copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy


def _like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__dict__.update(vars(function))
    return made


def _changed(function: FunctionType, kept: Sequence[Kept]) -> FunctionType | None:
    """A copy of a function whose calls of other functions call what stands in for them; None without its source."""
    tree = _definition(function)
    if tree is None:
        return None
    held: dict[str, Any] = {"fxpipe_partial": partial}
    texts = dict[str, str]()
    for number, (called, stand_in) in enumerate(kept):
        own, other = f"fxpipe_function_{number}", f"fxpipe_stand_in_{number}"
        held |= {own: called.function, other: stand_in}
        text = called.text
        texts[text] = f"{other} if {text} is {own} else {text}"
        if called.bound:
            given = f"fxpipe_partial({other}, *{text}.args, **{text}.keywords)"
            texts[text] = f"{given} if getattr({text}, 'func', None) is {own} else {text}"
    _Calls(texts).visit(tree)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in held.items()}
    given_names = [ast.arg(name) for name in cells if name != "__class__"]
    around = ast.FunctionDef("around", ast.arguments([], given_names, None, [], [], None, []), tree.body, [])
    whole = ast.fix_missing_locations(ast.Module([around], []))
    with suppress(SyntaxError, ValueError, KeyError):
        codes = _codes(compile(whole, function.__code__.co_filename, "exec", dont_inherit=True))
        code = next(code for code in codes if code.co_name == function.__code__.co_name)
        return _like(function, code, tuple(cells[name] for name in code.co_freevars))
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _definition(function: FunctionType) -> ast.Module | None:
    """The definition of a function as in its file, in a class if it is in one, for the sake of its private names."""
    code, owner = function.__code__, function.__qualname__.split(".")[-2:-1]
    try:
        text = inspect.getsource(code)
        inside = text[:1].isspace()  # the text of strings in it must stay as it is
        around = f"class {owner[0]}" if owner and owner[0].isidentifier() else "if True"
        tree = ast.parse(f"{around}:\n{text}" if inside else text)
    except (OSError, TypeError, SyntaxError):
        return None
    made: Any = tree.body[0]
    made = made.body[0] if inside else made
    if not isinstance(made, ast.FunctionDef):
        return None
    made.decorator_list, made.returns = [], None
    made.args.defaults, made.args.kw_defaults = [], [None] * len(made.args.kwonlyargs)
    for each in ast.walk(made.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    ast.increment_lineno(tree, code.co_firstlineno - 1 - inside)
    return tree


class _Calls(ast.NodeTransformer):
    """Replaces what is called: texts by texts."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = self.texts.get(ast.unparse(node.func))
        self.generic_visit(node)
        if text is not None:
            new = ast.parse(text, mode="eval").body
            for one in ast.walk(new):
                ast.copy_location(one, node.func)
            node.func = new
        return node
