"""Replaces functions of torch during a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables.base import VariableTracker

# The method by which Dynamo reads an attribute of what it traces: from torch 2.14 on it has the name of CPython's slot.
GETATTR = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"


def knows(*parts: tuple[object, str]) -> bool:
    """Whether torch still has all of these private parts: (owner, name)."""
    return all(hasattr(owner, name) for owner, name in parts)


@contextmanager
def patched(owner: Any, **functions: Any) -> Iterator[None]:
    """A context in which the class or module has these functions in place of its own, in all threads."""
    own = {name: getattr(owner, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name, function in own.items():
            setattr(owner, name, function)
