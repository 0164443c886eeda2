"""Replaces functions of torch, and holds back its logs, during a capture."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """A context in which the logger of this name says nothing: what fails is tried in another way, or our error says
    it better."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
