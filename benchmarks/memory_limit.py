"""What `memory_limit` chooses to recompute, beside the fixed modes: the most bytes of a device, and the time of a step.

    python -m benchmarks.memory_limit

The limit lies at 25, 50 and 75% of the way from what "always" needs to what "never" needs. A fixed mode fits if the
device that needs most stays within the limit. Predicted are steps as the choice sees them, with the profile of the ops;
measured is the median of steps that the pipes take in turn.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
from tabulate import tabulate

import fxpipe
from benchmarks.predicted_bytes import CHUNKS, MODELS, total
from fxpipe.ir.plan.plan import CHECKPOINT_MODES
from fxpipe.ir.units import show_seconds
from fxpipe.pipe.build.build import predict

SHARES = (0.25, 0.5, 0.75)
CASES = (("transformer, dropout", "1f1b"), ("transformer, dropout", "zb-v"), ("U-Net", "gpipe"))
HEADERS = ("model", "schedule", "limit", "bytes", "recompute", "most bytes", "predicted", "measured")


class Trained:
    """A pipe, its most bytes of a device in a step, and the predicted seconds of a step."""

    def __init__(self, name: str, schedule: str, checkpoint: str, limit: int | None = None) -> None:
        torch.manual_seed(0)
        model, args = MODELS[name]()
        options: dict[str, Any] = {"deferred_batch_norm": False, "schedule": schedule, "memory_limit": limit}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.pipe = fxpipe.compile(model.double(), 2, CHUNKS, backward="code", checkpoint=checkpoint, **options)
            self.step = partial(self.pipe.step, *args, loss_fn=total)
            self.step(timeline=True)
        timeline = self.pipe.timeline
        self.most, self.predicted = max(timeline.high_water), predict(self.pipe.build, CHUNKS).makespan
        self.modes = ", ".join(stage.checkpoint for stage in self.pipe.build.plan.stages)
        self.seconds: list[float] = []

    def timed(self) -> None:
        """Take a step, and note its time."""
        start = perf_counter()
        self.step()
        self.seconds.append(perf_counter() - start)


def compared(name: str, schedule: str, steps: int) -> tuple[Mapping[str, Trained], Mapping[float, tuple[int, Trained]]]:
    """The fixed modes, and for each share of the way the limit in bytes and the automatic choice; all are timed."""
    fixed = {mode: Trained(name, schedule, mode) for mode in CHECKPOINT_MODES}
    least, most = fixed["always"].most, fixed["never"].most
    limits = {share: int(least + share * (most - least)) for share in SHARES}
    chosen = {share: (limit, Trained(name, schedule, "auto", limit)) for share, limit in limits.items()}
    every = [*fixed.values(), *(one for _, one in chosen.values())]
    for _ in range(steps):
        for one in every:
            one.timed()
    for one in every:
        one.pipe.close()
    return fixed, chosen


def rows(steps: int) -> Iterator[tuple[str, ...]]:
    for name, schedule in CASES:
        fixed, chosen = compared(name, schedule, steps)
        for share, (limit, auto) in chosen.items():
            fitting = {mode: one for mode, one in fixed.items() if one.most <= limit}
            yield (name, schedule, f"{share:.0%}", f"{limit:,}", f"auto: {auto.modes}", *_figures(auto))
            for mode, one in fitting.items():
                yield ("", "", "", "", mode, *_figures(one))


def _figures(one: Trained) -> tuple[str, str, str]:
    return f"{one.most:,}", show_seconds(one.predicted), show_seconds(median(one.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description="Recomputation chosen within limits, beside the fixed modes that fit.")
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed, of each pipe")
    options = parser.parse_args()
    torch.set_num_threads(1)
    align = ("left", "left", "right", "right", "left", "right", "right", "right")
    print(tabulate(list(rows(options.steps)), HEADERS, disable_numparse=True, colalign=align))


if __name__ == "__main__":
    main()
