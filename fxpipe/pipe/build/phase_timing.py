"""How long each room takes, in the log at debug level: `logging.getLogger("fxpipe").setLevel(logging.DEBUG)`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

log = logging.getLogger("fxpipe")
rooms: list[str] = []  # those that work goes on in, from the outermost on


@contextmanager
def timed(room: str) -> Iterator[None]:
    """Logs what the block took, if nothing went wrong."""
    start = perf_counter()
    rooms.append(room)
    try:
        yield
    finally:
        rooms.remove(room)
    log.debug("%s: %.1f ms", room, 1e3 * (perf_counter() - start))
