"""Fewer collections of garbage while a model is captured and planned: hundreds of thousands of objects are made then,
nearly all of which stay, and Python would look through all of them again and again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 20_000  # that are made before a collection of the youngest; Python's default is 700, or 2,000 since 3.13
_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []  # the thresholds to go back to, once for each block under way


@contextmanager
def rare_collections() -> Iterator[None]:
    """A context in which garbage is collected seldom. Blocks may nest and overlap, in several threads: the thresholds
    are those of before once the last one ends."""
    with _lock:
        before = _before[0] if _before else gc.get_threshold()
        _before.append(before)
        if 0 < before[0] < OBJECTS:  # 0: there are none at all
            gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        with _lock:
            if gc.get_threshold()[0] == OBJECTS and len(_before) == 1:  # else the user has set others since
                gc.set_threshold(*_before[0])
            _before.pop()
