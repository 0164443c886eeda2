"""The compiler of the search's inner loops. A search asks for the time of some hundred thousand strategies, each of ten
thousand tasks; plain Python would take a second for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

try:
    from numba import njit
    from numba.core.types import unliteral
except ImportError as error:
    raise ImportError(
        "searching for strategies needs numba, which is not installed; pip install 'fxpipe[search]' brings it"
    ) from error

jit: Any = njit  # its own types leave options out

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function, for other compiled ones to call. It must not make arrays: so numba need not count
    references to its dozens of arguments, which took a third of a search."""
    result: F = _once(jit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)(function))
    return result


def allocating(function: F) -> F:
    """As `compiled`, for a function that makes arrays."""
    result: F = _once(jit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=True)(function))
    return result


def _once(function: Any) -> Any:
    """The function, compiled once for each types of arguments, without versions of its own for literal numbers."""
    compile_for = function.compile
    function.compile = lambda arguments: compile_for(tuple(map(unliteral, arguments)))
    return function


def entry(function: F) -> F:
    """The function, for Python to call; cached on disk. Its name there has a hash of all files of this folder, because
    numba only checks whether the file of the entry itself has changed."""
    function.__qualname__ += f"-{_sources()}"
    result: F = jit(cache=True, no_cfunc_wrapper=True)(function)
    return result


@cache
def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
