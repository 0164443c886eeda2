"""The bar of the command line gets to its end, and leaves the log as it was."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.clock import log
from fxpipe.progress import STEPS, elapsing, progress


def test_the_bar_counts_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    notes, level = Notes(), log.level
    with progress("compiling"):
        log.addHandler(notes)
        fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 2, 2, example_inputs=torch.zeros(4, 4)).close()
    log.removeHandler(notes)
    assert len(seen) == STEPS
    assert log.level == level
    assert not capsys.readouterr().err, "what is no terminal gets no bar"


def test_the_clock_goes_on_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    before, level = threading.active_count(), log.level
    with elapsing("planning", seconds=0.3):
        assert log.level == logging.DEBUG
        time.sleep(0.5)
    assert threading.active_count() <= before  # an earlier test's may end just now
    assert log.level == level
    assert not capsys.readouterr().err
