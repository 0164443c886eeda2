"""Marks of tests: which run by default and which with `pytest -m slow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: Callable[[Any], bool]) -> list[Any]:
    """The values for `parametrize`, a tuple for several arguments; those that are not quick are marked as slow."""
    return [value if quick(value) else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
