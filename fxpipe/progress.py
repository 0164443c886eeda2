"""A bar while a model is compiled, for the command line: each step that the log reports moves it on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from .clock import log
from .passes import PASSES

# What the log reports: capture, profiling, planning, cut, each pass, all passes, simulator, codegen, loading.
STEPS = 8 + len(PASSES)


class _Bar(logging.Handler):
    """A log handler that moves a bar instead of writing lines."""

    def __init__(self, bar: tqdm[Any]) -> None:
        super().__init__()
        self.bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self.bar.set_postfix_str(record.getMessage(), refresh=False)
        self.bar.update()


@contextmanager
def progress(title: str) -> Iterator[None]:
    """Shows, on standard error, how far the compilation in this block is; nothing stays of it."""
    level, propagate = log.level, log.propagate
    with tqdm(total=STEPS, desc=title, leave=False, disable=None) as bar:  # a terminal alone has a use for it
        handler = _Bar(bar)
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate
