"""Progress of slow work: a line in the log when it begins, and, if standard error is a terminal, a line there with the
elapsed time, which disappears when the work ends.

    logging.basicConfig(level=logging.INFO)     INFO:fxpipe:capturing UNet: first call
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tqdm import tqdm

from fxpipe.pipe.build.phase_timing import log, rooms

TICK = 0.2  # seconds; shorter work shows no line
PLAIN, LIMITED = "fxpipe: {desc}{postfix} [{elapsed}]", "fxpipe: {desc}{postfix} {n:.0f} of {total:.0f} s |{bar}|"
one_line = threading.Lock()  # held while a line is shown: at most one in a process


@contextmanager
def working(what: str, seconds: float | None = None, leads: bool = True) -> Iterator[None]:
    """A context that shows progress: `what` the block does, and its current phase. `seconds`: how long it may take, if
    known. `leads`: whether this process shows it, when several do the same."""
    if leads:
        log.info(what)
    with line(what, seconds) if leads and sys.stderr.isatty() else nullcontext():
        yield


@contextmanager
def line(what: str, seconds: float | None = None) -> Iterator[None]:
    """A context that shows a line on the terminal, unless an outer block already does."""
    if not one_line.acquire(blocking=False):
        yield
        return
    done = threading.Event()

    def tick() -> None:
        while not done.wait(TICK):
            bar.set_postfix_str(rooms[-1] if rooms else "", refresh=False)
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
