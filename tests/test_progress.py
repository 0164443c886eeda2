"""The bar of the command line gets to its end, and leaves the log as it was."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.clock import log
from fxpipe.progress import STEPS, progress


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
