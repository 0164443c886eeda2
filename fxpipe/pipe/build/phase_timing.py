"""How long each phase of a build ("room") takes, in the log at debug level:
`logging.getLogger("fxpipe").setLevel(logging.DEBUG)`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

log = logging.getLogger("fxpipe")
rooms: list[str] = []  # the phases that are running, the outermost first


@contextmanager
def timed(room: str) -> Iterator[None]:
    """A context that logs its time in milliseconds, unless it raises."""
    start = perf_counter()
    rooms.append(room)
    try:
        yield
    finally:
        rooms.remove(room)
    log.debug("%s: %.1f ms", room, 1e3 * (perf_counter() - start))
