"""The tables of the DAPPLE paper beside what fxpipe plans from the authors' profiles.

    python -m benchmarks.dapple

Table V is which plan is best for a model, a batch and a cluster of 16 GPUs; Table VII compares plans with PipeDream's.
The released planner's formula and constants decide, as they did for the paper; `fxpipe.planning.dapple_released` says
which these are. The last table runs DAPPLE's and PipeDream's plans through our own event time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.ir.chain import Chain
from fxpipe.ir.hybrid import shape
from fxpipe.planning.dapple_profiles import read
from fxpipe.planning.dapple_released import (
    CONFIGURATIONS,
    Candidate,
    Job,
    candidates,
    data_parallel_time,
    hybrid_plan,
)

from .paper_data import expected, profile_path


@dataclass(frozen=True)
class Case:
    """A model of Table V: the authors' profile, the batch, and, from their example programs, the micro-batch, the peak
    of activations in bytes per sample and how often parameters are kept. `fits` is whether Table II lets one GPU of
    16 GB train it at all: AmoebaNet-36 needs 20 GB for one sample."""

    model: str
    profile: str
    batch: int
    micro_batch: int
    activations: float
    copies: float
    fits: bool = True


TABLE_V = (
    Case("ResNet-50", "resnet-50-analytic-pbs-128", 2048, 128, 70e6, 2),
    Case("VGG-19", "vgg-19-pbs-32", 2048, 32, 70e6, 2),
    Case("GNMT-16", "gnmt-16-pbs-64", 1024, 64, 100e6, 3),
    Case("BERT-48", "bert-48-pbs-2", 64, 1, 3.473e9, 3),
    Case("XLNet-36", "xlnet-36-pbs-1", 128, 1, 5.914e9, 3),
    Case("AmoebaNet-36", "amoeba-36-pbs-1", 128, 1, 0.376e9, 2, fits=False),
)

# The states of a profile that the paper's splits name, for the plans of Table V that are cut in two: "13:6" of VGG-19
# is before state 17 (13 convolutions, and 4 pools between them).
SPLITS = {
    ("VGG-19", "C"): 17,
    ("GNMT-16", "A"): 16,
    ("GNMT-16", "B"): 16,
    ("BERT-48", "A"): 29,
    ("XLNet-36", "A"): 22,
    ("XLNet-36", "B"): 22,
    ("AmoebaNet-36", "A"): 29,
    ("AmoebaNet-36", "B"): 32,
    ("AmoebaNet-36", "C"): 32,
}


@dataclass(frozen=True)
class Row:
    """A cell of Table V: what the paper says, what we plan, where we cut and where the paper does (by state), the
    speed-up over one GPU, and the seconds that planning took."""

    model: str
    configuration: str
    paper: str
    ours: str
    split: int | None
    paper_split: int | None
    speedup: float
    seconds: float


def states(name: str) -> Chain:
    return read(profile_path(name), states=True)


def table_v() -> Iterator[Row]:
    """All 18 cells."""
    for case, row in zip(TABLE_V, expected()["table_V"], strict=True):
        for configuration, machine in CONFIGURATIONS.items():
            job = Job(states(case.profile), machine, case.batch, case.micro_batch)
            told = row[configuration]
            paper = told if isinstance(told, str) else told["plan"]
            started = time.perf_counter()
            ours, split, latency = decide(case, job)
            seconds = time.perf_counter() - started
            at = SPLITS.get((case.model, configuration))
            yield Row(case.model, configuration, paper, ours, split, at, job.times[-1] / latency, seconds)


def decide(case: Case, job: Job) -> tuple[str, int | None, float]:
    """The plan by the paper's rule: data parallelism where it fits and is faster than the best pipeline."""
    fastest = candidates(job)[0]
    parallel = data_parallel_time(job, case.activations, case.copies) if case.fits else float("inf")
    if parallel < fastest.latency:
        return "DP", None, parallel
    return named(job, fastest), fastest.stages[0].end if len(fastest.stages) == 2 else None, fastest.latency


def named(job: Job, candidate: Candidate) -> str:
    return shape(hybrid_plan(job, candidate).stages)
