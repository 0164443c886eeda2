"""How long each phase of a build takes, in the log at debug level:
`logging.getLogger("fxpipe").setLevel(logging.DEBUG)`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

log = logging.getLogger("fxpipe")
phases: list[str] = []  # the phases that are running, the outermost first


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """A context that logs its time in milliseconds, unless it raises."""
    start = perf_counter()
    phases.append(phase)
    try:
        yield
    finally:
        phases.remove(phase)
    log.debug("%s: %.1f ms", phase, 1e3 * (perf_counter() - start))
