"""What fxpipe needs of torch that is not public, and whether this torch has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, ParamSpec, TypeVar

import torch

from fxpipe.errors import FxpipeError

TESTED = "2.13, 2.14 and 2.15"
LOWEST, HIGHEST = (2, 13), (2, 15)


@dataclass(eq=False)
class Capability:
    """Something that torch does for fxpipe under names that are not public.

    - `what`: what it does, in words for messages.
    - `names`: the names, in full. One of several that are joined by ` or ` is enough.
    - `since`: the first version of torch that has them like this.
    - `without`: what fxpipe does where they are not there.
    - `check`: asks more than whether the names are there.
    - `needed`: whether fxpipe does nothing at all without it.
    """

    what: str
    names: tuple[str, ...]
    since: str
    without: str
    check: Callable[[], bool] | None = None
    needed: bool = False

    @cached_property
    def there(self) -> bool:
        """Whether this torch has it."""
        known = all(any(map(exists, name.split(" or "))) for name in self.names)
        try:
            return known and (self.check is None or self.check())
        except Exception:  # whatever torch raises, it does not do what is asked
            return False

    def need(self, where: str) -> None:
        """Raise FxpipeError if torch does not have it. `where`: what cannot be done then."""
        if not self.there:
            names = ", ".join(self.names)
            raise FxpipeError(
                f"{where} needs of torch: {self.what} ({names}). PyTorch {torch.__version__} does not have it as "
                f"fxpipe knows it: install one that has been tested, {TESTED}"
            )


P = ParamSpec("P")
T = TypeVar("T")
Context = Callable[P, AbstractContextManager[T | None]]


def if_there(capability: Capability) -> Callable[[Context[P, T]], Context[P, T]]:
    """A decorator of functions that return a context: where torch does not have the capability, it does nothing."""

    def decorate(context: Context[P, T]) -> Context[P, T]:
        @wraps(context)
        def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T | None]:
            return context(*args, **kwargs) if capability.there else nullcontext()

        return made

    return decorate


def exists(name: str) -> bool:
    """Whether a full name leads to something."""
    try:
        found(name)
    except (ImportError, AttributeError, Warning):  # the last where warnings are errors, and a module warns
        return False
    return True


def found(name: str) -> Any:
    """What a full name of torch's leads to. Raises ImportError or AttributeError."""
    parts = name.split(".")
    value: Any = import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            import_module(".".join(parts[:count]))  # a module that nobody has imported
        value = getattr(value, part)
    return value


def capabilities() -> list[Capability]:
    """All that fxpipe uses of torch outside of its captures, in the order of their files."""
    package = import_module("fxpipe.torch_internals")
    names = (module.name for module in walk_packages(package.__path__, f"{package.__name__}."))
    values = (value for name in names for value in vars(import_module(name)).values())
    return list({id(value): value for value in values if isinstance(value, Capability)}.values())


@cache
def needed() -> tuple[Capability, ...]:
    """Those without which fxpipe does nothing."""
    return tuple(one for one in capabilities() if one.needed)


def check_torch(what: str) -> None:
    """Raise FxpipeError if torch does not have what fxpipe needs for anything. `what`: who asks, for the message."""
    for one in needed():
        one.need(what)
