"""Faults at random places: one of the ops that the stages of a pipe run fails, in forward, in recomputation, or when
its gradient comes back; or a submodule that is kept whole.

The generated code reads `torch` and `F` in its own modules, so what stands there can be something that counts the
calls, and lets one of them fail, in whatever stage and micro-batch that is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

from torch import Tensor

from fxpipe import Pipe

NAMES = ("torch", "F", "operator")


class Planned(Exception):
    """A fault that cannot be made anew from its text."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: Planned(3, "planned"), lambda: ValueError("planned"), lambda: MemoryError("planned"),
    lambda: RuntimeError("planned"), lambda: KeyError("planned"), lambda: StopIteration("planned"),
)  # fmt: skip


@dataclass
class Trap:
    """Counts the calls of ops, and raises `error` in number `at`, or where its gradient comes (`backward`). `sprung`
    is set when it has."""

    at: int = 0
    backward: bool = False
    error: Exception | None = None
    calls: int = 0
    sprung: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.calls += 1
            here = self.calls == self.at
        if here and not self.backward:
            self.spring()
        found = function(*args, **kwargs)
        if here and isinstance(found, Tensor) and found.requires_grad:
            found.register_hook(self.spring)
        return found

    def spring(self, _: Any = None) -> None:
        self.sprung = True
        assert self.error is not None
        raise self.error


class Watched(ModuleType):
    """Stands for a module of torch's: its functions are called through the trap."""

    def __init__(self, module: Any, trap: Trap) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _trap=trap)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name == "_functorch" or isinstance(found, type):  # what enters and leaves a vmap does not fail
            return found
        if isinstance(found, ModuleType):
            return Watched(found, self._trap)
        return WatchedFunction(found, self._trap) if callable(found) else found


@dataclass
class WatchedFunction:
    """Stands for a function of torch's, or an op with its overloads: each is called through the trap."""

    function: Callable[..., Any]
    trap: Trap

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.trap.call(self.function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return WatchedFunction(getattr(self.function, name), self.trap)


@contextmanager
def watched(pipe: Pipe, trap: Trap) -> Iterator[None]:
    """In this context, the stages of the pipe call their functions through the trap."""
    # A copy, made at once: the garbage collector may unload a package while names are gathered.
    names = {live.package.__name__ for live in pipe._state.cache.lives.values()}
    modules = [module for name, module in sys.modules.copy().items() if name.rpartition(".")[0] in names]
    own = [(vars(module), name, vars(module)[name]) for module in modules for name in NAMES if name in vars(module)]
    for space, name, value in own:
        space[name] = Watched(value, trap)
    try:
        yield
    finally:
        for space, name, value in own:
            space[name] = value


def planned(rng: Random, calls: int) -> Trap:
    return Trap(rng.randint(1, max(1, calls)), rng.random() < 0.5, rng.choice(ERRORS)())
