"""A model of a library, for the time of a call, with some methods of its class replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_methods(model: Any, **methods: Callable[..., Any]) -> Any:
    """An object of a subclass of the model's class, with these methods and the attributes of the model: what is set on
    one is set on both."""
    kind = type(model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: Any = object.__new__(type(kind.__name__, (kind,), {**names, **methods}))
    object.__setattr__(made, "__dict__", vars(model))
    return made
