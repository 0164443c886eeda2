"""Runs a script that a campaign has written: the model in it, under its settings."""

from __future__ import annotations

from pathlib import Path

import torch

from .ranks import Ranks
from .setting import Run, Setting
from .subject import load
from .trial import trial


def main(path: str) -> int:
    """1 while a run of the script's model is wrong."""
    torch.set_num_threads(1)
    module = load(Path(path))
    settings = [Setting(options, tuple(Run(*run) for run in runs)) for options, runs in module.SETTINGS]
    ranks, bad = Ranks(), 0
    try:
        for outcome in trial(Path(path), settings, module.HALF, ranks):
            print(f"{outcome.what}: {outcome.run} of {settings[outcome.setting].options}\n{outcome.text}".rstrip())
            bad += outcome.bad
    finally:
        ranks.close()
    return int(bad > 0)
