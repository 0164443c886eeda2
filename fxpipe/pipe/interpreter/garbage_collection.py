"""Fewer collections of garbage while a model is captured and planned: hundreds of thousands of objects are made then,
nearly all of which stay, and Python would look through all of them again and again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 20_000  # that are made before a collection of the youngest; Python's default is 700, or 2,000 since 3.13
_lock = threading.Lock()
_blocks = 0  # under way
_before = (0, 0, 0)  # the thresholds to go back to


@contextmanager
def rare_collections() -> Iterator[None]:
    """A context in which garbage is collected seldom. Blocks may nest and overlap, in several threads: the thresholds
    are those of before once the last one ends, unless the user has set others since."""
    global _blocks, _before
    with _lock:
        _blocks += 1
        if _blocks == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < OBJECTS:  # 0: there are none at all
                gc.set_threshold(OBJECTS, *_before[1:])
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and gc.get_threshold()[0] == OBJECTS:
                gc.set_threshold(*_before)
