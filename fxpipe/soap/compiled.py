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
except ImportError as error:
    raise ImportError(
        "searching for strategies needs numba, which is not installed; pip install 'fxpipe[search]' brings it"
    ) from error

jit: Any = njit  # its own types leave options out

COMPILED = ("arrays", "edges", "delta", "full", "chain", "exhaust")  # the files with compiled functions

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function, for other compiled ones to call."""
    result: F = jit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return result


def entry(function: F) -> F:
    """The function, for Python to call; kept on disk. The files that it calls into are in its name there: the cache
    itself looks only whether the file of the entry has changed."""
    function.__qualname__ += f"-{_sources()}"
    result: F = jit(cache=True)(function)
    return result


@cache
def _sources() -> str:
    here = Path(__file__).parent
    return sha256(b"".join((here / f"{name}.py").read_bytes() for name in COMPILED)).hexdigest()[:12]
