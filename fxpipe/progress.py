"""Bars for the command line: one for what has a known number of steps, which moves with each that the log reports, and
one for what has a time limit, which moves with the clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from .clock import log
from .passes import PASSES

# What the log reports: capture, profiling, planning, cut, each pass, all passes, simulator, codegen, loading.
STEPS = 8 + len(PASSES)
TICK = 0.2  # seconds


class _Bar(logging.Handler):
    """A log handler that moves a bar by `step` instead of writing lines."""

    def __init__(self, bar: tqdm[Any], step: int) -> None:
        super().__init__()
        self.bar, self.step = bar, step

    def emit(self, record: logging.LogRecord) -> None:
        self.bar.set_postfix_str(record.getMessage(), refresh=False)
        self.bar.update(self.step)


@contextmanager
def progress(title: str) -> Iterator[None]:
    """Shows, on standard error, how far the compilation in this block is; nothing stays of it."""
    # A terminal alone has a use for it.
    with tqdm(total=STEPS, desc=title, leave=False, disable=None) as bar, _followed(bar, step=1):
        yield


@contextmanager
def elapsing(title: str, seconds: float) -> Iterator[None]:
    """Shows how much has passed of the seconds that this block may take, and what it has done last."""
    form = "{desc}: {n:.0f} of {total:.0f} s |{bar}|{postfix}"
    done = threading.Event()
    with tqdm(total=seconds, desc=title, leave=False, disable=None, bar_format=form) as bar, _followed(bar, step=0):

        def tick() -> None:
            while not done.wait(TICK):
                bar.update(min(TICK, seconds - bar.n))

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield
        finally:
            done.set()
            clock.join()


@contextmanager
def _followed(bar: tqdm[Any], step: int) -> Iterator[None]:
    """The log goes to the bar."""
    level, propagate = log.level, log.propagate
    handler = _Bar(bar, step)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
