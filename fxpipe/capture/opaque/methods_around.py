"""Methods that a refused line is in: the model's own forward calls them, and what is kept whole may be one of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from traceback import FrameSummary
from types import CodeType, FunctionType

from torch import nn

from fxpipe.ir.graph.graph import Origin


def methods_of(module: nn.Module, frames: Sequence[FrameSummary]) -> list[str]:
    """The methods of a module that its forward has called, among the calls that led to a line; innermost first."""
    forward = _code(module, "forward")
    found: list[str] = []
    for frame in reversed(frames):
        if forward is not None and _is_in(frame, forward):
            return found
        own = not frame.name.startswith("__") and not hasattr(nn.Module, frame.name)
        code = _code(module, frame.name) if own and frame.name not in vars(module) else None
        if code is not None and _is_in(frame, code):
            found.append(frame.name)
    return []  # something else has called them


def frames_at(module: nn.Module, where: Origin) -> list[FrameSummary]:
    """The calls that lead to a line of a module's forward, or of a method that forward calls itself; [] if it is in
    neither."""
    forward = _code(module, "forward")
    for name in dict.fromkeys(name for kind in type(module).__mro__ for name in vars(kind)):
        code = _code(module, name)
        found = FrameSummary(where.file, where.line, name, lookup_line=False)
        if forward is not None and code is not None and _is_in(found, code):
            outer = FrameSummary(forward.co_filename, forward.co_firstlineno, "forward", lookup_line=False)
            return [outer, found]
    return []


def _code(module: nn.Module, name: str) -> CodeType | None:
    """The code of a method, without decorators."""
    method = inspect.getattr_static(type(module), name, None)
    function = inspect.unwrap(method) if isinstance(method, FunctionType) else None
    return function.__code__ if isinstance(function, FunctionType) else None


def _is_in(frame: FrameSummary, code: CodeType) -> bool:
    return (frame.filename, frame.name) == (code.co_filename, code.co_name) and frame.lineno in set(_lines(code))


def _lines(code: CodeType) -> Iterator[int | None]:
    return (line for _, _, line in code.co_lines())
