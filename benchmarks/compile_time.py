"""How long a model takes from capture to a running pipeline, beside the capture alone.

    python -m benchmarks.compile_time

Two kinds of model, of about 100, 1,000 and 10,000 ops each. "Capture" is the first call of `torch.compile` with a
backend that runs the captured graph as it is, the batch marked as dynamic. "fxpipe" is `fxpipe.compile` and the first
call of the pipe; a second table says in which phase the time went. Seconds are of the CPU: of a compilation, which is
one thread's work, they are those of the clock on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import median
from time import process_time

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, fx, nn
from tqdm import tqdm

import fxpipe

WIDTH = 8
STAGES = 4
CHUNKS = 4
PHASES = ("capture", "profiling", "planning", "passes", "simulator", "codegen", "loading", "running")


class Block(nn.Module):
    """A residual block of 5 ops, as in the transformers' MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Residuals(nn.Module):
    """A deep chain of residual blocks."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(round(ops / 5)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Unit(nn.Module):
    """Convolution, batch norm with its counter, and a ReLU that writes in place: 4 ops."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, WIDTH, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Fork(nn.Module):
    """Two branches side by side, put together and added to what came in: 14 ops."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.mix = Unit(WIDTH, 1), Unit(WIDTH, 3), Unit(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(torch.cat((self.fine(x), self.coarse(x)), dim=1))


class Branches(nn.Module):
    """A U-Net's shape: forks on the way down, forks on the way up, and a skip from each to its counterpart."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        depth = round(ops / 29)
        self.down = nn.ModuleList(Fork() for _ in range(depth))
        self.up = nn.ModuleList(Fork() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for fork in self.down:
            x = fork(x)
            skips.append(x)
        for fork in self.up:
            x = fork(x) + skips.pop()
        return x


# Each kind of model, with the shape of a sample.
MODELS: Mapping[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "residuals": (Residuals, (WIDTH,)),
    "branches": (Branches, (WIDTH, 4, 4)),
}


@dataclass(frozen=True)
class Run:
    """One compilation: ops that were captured, seconds in all, and seconds in each of fxpipe's phases."""

    ops: int
    seconds: float
    phases: Mapping[str, float]


def capture_alone(model: nn.Module, x: Tensor) -> Run:
    captured: list[fx.Graph] = []

    def as_it_is(module: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., object]:
        captured.append(module.graph)
        return module.forward

    torch._dynamo.maybe_mark_dynamic(x, 0)
    start = process_time()
    torch.compile(model, backend=as_it_is, fullgraph=True)(x)
    seconds = process_time() - start
    return Run(sum(node.op in ("call_function", "call_method") for node in captured[0].nodes), seconds, {})


def capture_to_running(model: nn.Module, x: Tensor) -> Run:
    devices = [f"cpu:{stage}" for stage in range(STAGES)]
    with laps() as phases:
        start = process_time()
        pipe = fxpipe.compile(model, devices=devices, chunks=CHUNKS)
        pipe.prepare(x)
        built = process_time()
        pipe(x)
        done = process_time()
    ops = len(pipe.build.graph.ops)
    pipe.close()
    return Run(ops, done - start, {**phases, "running": done - built})


@contextmanager
def laps() -> Iterator[dict[str, float]]:
    """Seconds per phase: fxpipe's log has a line at the end of each."""
    phases: dict[str, float] = {}

    class Handler(logging.Handler):
        last = process_time()

        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple) and record.args and record.args[0] in PHASES:
                now = process_time()
                phases[str(record.args[0])], self.last = now - self.last, now

    logger, handler = logging.getLogger("fxpipe"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield phases
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


ROUTES = {"capture": capture_alone, "fxpipe": capture_to_running}


def run(route: str, kind: str, ops: int) -> Run:
    """One route, from nothing, on a new model."""
    torch._dynamo.reset()
    make, sample = MODELS[kind]
    model, x = make(ops), torch.randn(2 * CHUNKS, *sample)
    gc.collect()
    return ROUTES[route](model, x)


Runs = dict[tuple[str, int, str], Run]  # by kind, ops asked for, and route


def measure(sizes: Sequence[int], repeats: int) -> Runs:
    """The median run of each route on each kind and size; the routes take turns."""
    for route in ROUTES:
        for kind in MODELS:
            run(route, kind, 30)  # what the first capture of a process loads is not the model's cost
    found: Runs = {}
    for kind, ops in tqdm([(kind, ops) for kind in MODELS for ops in sizes], leave=False):
        turns = [{route: run(route, kind, ops) for route in ROUTES} for _ in range(repeats)]
        found |= {(kind, ops, route): _middle([turn[route] for turn in turns]) for route in ROUTES}
    return found


def _middle(runs: Sequence[Run]) -> Run:
    phases = {phase: median(run.phases[phase] for run in runs) for phase in runs[0].phases}
    return Run(runs[0].ops, median(run.seconds for run in runs), phases)


def table(runs: Runs) -> str:
    """Seconds, and how they grew since the size before, beside what n log n would."""
    headers = ("model", "ops", "capture s", "fxpipe s", "ratio", "ms per op", "growth", "n log n")
    return tabulate(list(_rows(runs)), headers, stralign="right", disable_numparse=True)


def _rows(runs: Runs) -> Iterator[list[str]]:
    for kind in dict.fromkeys(kind for kind, _, _ in runs):
        sizes = sorted({ops for other, ops, _ in runs if other == kind})
        for before, size in pairwise([None, *sizes]):
            alone, pipe = runs[kind, size or 0, "capture"], runs[kind, size or 0, "fxpipe"]
            row = [kind, f"{pipe.ops:,}", f"{alone.seconds:.2f}", f"{pipe.seconds:.2f}"]
            row += [f"{pipe.seconds / alone.seconds:.2f}", f"{pipe.seconds / pipe.ops * 1e3:.2f}"]
            if before is not None:
                last = runs[kind, before, "fxpipe"]
                row += [f"{pipe.seconds / last.seconds:.1f}x"]
                row += [f"{pipe.ops * log(pipe.ops) / (last.ops * log(last.ops)):.1f}x"]
            yield row


def room_table(runs: Runs) -> str:
    """Seconds in each of fxpipe's phases."""
    rows = [
        [kind, f"{run.ops:,}", *(f"{run.phases[phase]:.2f}" for phase in PHASES)]
        for (kind, _, route), run in runs.items()
        if route == "fxpipe"
    ]
    return tabulate(rows, ("model", "ops", *PHASES), stralign="right", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from capture to a running pipeline.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000], help="ops per model, about")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = measure(options.sizes, options.repeats)
    print(table(runs), room_table(runs), sep="\n\n")


if __name__ == "__main__":
    main()
