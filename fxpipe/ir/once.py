"""Facts about a frozen value, such as a graph, that many ask for and that cost a walk through all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Value = TypeVar("Value")
Fact = TypeVar("Fact")


def once(function: Callable[[Value], Fact]) -> Callable[[Value], Fact]:
    """The function, computed once for each value. The value keeps the fact, all callers share it, and none changes it.

    >>> import types
    >>> value = types.SimpleNamespace()
    >>> made = once(lambda value: [])
    >>> made(value) is made(value)
    True
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def known(value: Value) -> Fact:
        facts: dict[str, Any] = vars(value)
        if name not in facts:
            facts[name] = function(value)
        found: Fact = facts[name]
        return found

    return known
