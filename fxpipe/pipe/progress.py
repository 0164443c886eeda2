"""Progress of slow work: a line in the log when it begins, and, if standard error is a terminal, a line there with the
elapsed time, which disappears when the work ends. Elsewhere, as in the files of a cluster, work that takes about a
second is one plain line on standard error, unless the log has it already, or hides even warnings. At debug level the
log says how long each phase takes.

    logging.basicConfig(level=logging.INFO)                    INFO:fxpipe:capturing UNet: first call
    otherwise                                                  fxpipe: capturing UNet: first call
    logging.getLogger("fxpipe").setLevel(logging.ERROR)        nothing
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter

from tqdm import tqdm

log = logging.getLogger("fxpipe")
phases: list[str] = []  # the phases that are running, the outermost first

TICK = 0.2  # seconds; shorter work shows no line on a terminal,
LATE = 0.9  # and none elsewhere
PLAIN, LIMITED = "fxpipe: {desc}{postfix} [{elapsed}]", "fxpipe: {desc}{postfix} {n:.0f} of {total:.0f} s |{bar}|"
one_line = threading.Lock()  # held while a line is shown: at most one in a process


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


@contextmanager
def working(what: str, seconds: float | None = None, leads: bool = True) -> Iterator[None]:
    """A context that shows progress: `what` the block does, and its current phase. `seconds`: how long it may take, if
    known. `leads`: whether this process shows it, when several do the same."""
    if leads:
        log.info(what)
    shown = line(what, seconds) if sys.stderr.isatty() else plain_line(what)
    with shown if leads else nullcontext():
        yield


@contextmanager
def plain_line(what: str) -> Iterator[None]:
    """A context that prints a line if it takes long, unless an outer block already does."""
    if log.isEnabledFor(logging.INFO) or not log.isEnabledFor(logging.WARNING) or not one_line.acquire(blocking=False):
        yield
        return
    late = threading.Timer(LATE, lambda: print(f"fxpipe: {what}", file=sys.stderr, flush=True))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()
        one_line.release()


@contextmanager
def line(what: str, seconds: float | None = None) -> Iterator[None]:
    """A context that shows a line on the terminal, unless an outer block already does."""
    if not one_line.acquire(blocking=False):
        yield
        return
    done = threading.Event()

    def tick() -> None:
        while not done.wait(TICK):
            bar.set_postfix_str(phases[-1] if phases else "", refresh=False)
            bar.update(TICK if seconds is None else min(TICK, seconds - bar.n))

    try:
        form = PLAIN if seconds is None else LIMITED
        with tqdm(total=seconds, desc=what, leave=False, bar_format=form, delay=TICK, mininterval=0, miniters=0) as bar:
            clock = threading.Thread(target=tick, daemon=True)
            clock.start()
            try:
                yield
            finally:
                done.set()
                clock.join()
    finally:
        one_line.release()
