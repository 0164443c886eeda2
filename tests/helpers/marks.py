"""Marks of tests: which run by default, which with `pytest -m slow`, and which with `pytest -m long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: Callable[[Any], bool], every: int = 1) -> list[Any]:
    """The values for `parametrize`, a tuple for several arguments; those that are not quick are marked as slow: each
    `every`-th of them, the others as long."""
    values = list(values)
    others = iter(_marked([value for value in values if not quick(value)], every))
    return [value if quick(value) else next(others) for value in values]


def slow_in_turn(values: Iterable[Any], every: int) -> list[Any]:
    """The values for `parametrize`: each `every`-th is marked as slow, the others as long."""
    return _marked(list(values), every)


def _marked(values: list[Any], every: int) -> list[Any]:
    return [_with(value, pytest.mark.long if place % every else pytest.mark.slow) for place, value in enumerate(values)]


def _with(value: Any, mark: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
