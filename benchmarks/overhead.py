"""What a pipeline costs the host: time per stage and micro-batch when the stages do next to nothing.

    python -m benchmarks.overhead

Four tiny stages, eight micro-batches, forward and backward on CPU workers. The plain loop does the same work one
micro-batch after another; what a pipeline takes beyond that is its overhead. (With recomputation the pipelines also
run seven of eight forward passes twice.) The first table is of calls, with autograd's backward; the second of whole
training steps with a loss, `pipe.step` and its peers.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Mapping
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from benchmarks.throughput import measure
from benchmarks.timing import in_turn, median_difference
from benchmarks.trainers import PIPELINING, TORCHGPIPE
from benchmarks.workload import Workload

STAGES = 4
CHUNKS = 8
WIDTH = 16
PLAIN = "plain loop"
MODES = ("never", "except_last")
TINY = Workload(stages=STAGES, chunks=CHUNKS, rows=4, width=WIDTH, depth=1)
Step = Callable[[], object]


def tiny_model() -> nn.Sequential:
    """One small layer per stage."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)))


def batch() -> Tensor:
    return torch.randn(4 * CHUNKS, WIDTH)


def plain_step() -> Step:
    model, x = tiny_model(), batch()

    def step() -> None:
        outputs = [model(part) for part in x.tensor_split(CHUNKS)]
        torch.cat(outputs).sum().backward()

    return step


def training_step(pipe: Callable[[Tensor], Tensor]) -> Step:
    x = batch()
    return lambda: pipe(x).sum().backward()


def torchgpipe_step(checkpoint: str) -> Step:
    from torchgpipe import GPipe

    devices = ["cpu"] * STAGES
    return training_step(GPipe(tiny_model(), [1] * STAGES, devices=devices, chunks=CHUNKS, checkpoint=checkpoint))


def fxpipe_step(checkpoint: str) -> Step:
    devices = [f"cpu:{stage}" for stage in range(STAGES)]
    cut = [str(stage) for stage in range(1, STAGES)]
    return training_step(fxpipe.compile(tiny_model(), devices=devices, chunks=CHUNKS, checkpoint=checkpoint, cut=cut))


def candidates() -> dict[str, Step]:
    """The plain loop, then each pipeline that is installed, without and with recomputation."""
    found = {PLAIN: plain_step()}
    if importlib.util.find_spec("torchgpipe"):
        found |= {f"torchgpipe, {mode}": torchgpipe_step(mode) for mode in MODES}
    if callable(getattr(fxpipe, "compile", None)):
        found |= {f"fxpipe, {mode}": fxpipe_step(mode) for mode in MODES}
    return found


def table(seconds: dict[str, list[float]]) -> str:
    """Microseconds per stage and micro-batch, overhead over the plain loop, and that as a part of torchgpipe's."""
    tasks = STAGES * CHUNKS
    overhead = {name: median_difference(times, seconds[PLAIN]) / tasks * 1e6 for name, times in seconds.items()}
    rows = []
    for name, times in seconds.items():
        peer = overhead.get(f"torchgpipe, {name.split(', ')[-1]}")
        part = f"{overhead[name] / peer:.2f}" if peer and name.startswith("fxpipe") else ""
        over = "" if name == PLAIN else f"{overhead[name]:.1f}"
        rows.append((name, f"{median(times) / tasks * 1e6:.1f}", over, part))
    headers = ("", "us per task", "overhead", "of torchgpipe's")
    return tabulate(rows, headers, colalign=("left", "right", "right", "right"), disable_numparse=True)


def step_table(work: Workload, seconds: Mapping[str, list[float]]) -> str:
    """Microseconds of a training step per stage and micro-batch, overhead over the plain loop, and for fxpipe how much
    of each peer's time it takes: of torch.distributed.pipelining's, the faster schedule's."""
    tasks = work.stages * work.chunks
    peers = {
        peer: min((median(times) for name, times in seconds.items() if name.startswith(peer)), default=0.0)
        for peer in (TORCHGPIPE, PIPELINING)
    }
    rows = []
    for name, times in seconds.items():
        over = f"{median_difference(times, seconds[PLAIN]) / tasks * 1e6:.1f}" if name != PLAIN else ""
        parts = [f"{median(times) / peer:.2f}" if peer and name.startswith("fxpipe") else "" for peer in peers.values()]
        rows.append((name, f"{median(times) / tasks * 1e6:.1f}", over, *parts))
    headers = ("", "us per task", "overhead", "of torchgpipe's time", "of pipelining's")
    return tabulate(rows, headers, colalign=("left", *["right"] * 4), disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time per stage and micro-batch, forward and backward.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="training steps of each candidate in a round")
    parser.add_argument("--only", nargs="+", default=(), help="words of the trainers to run beside the plain loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("forward and backward\n")
    print(table(in_turn(candidates(), options.rounds, options.steps)))
    print("\ntraining step\n")
    print(step_table(TINY, measure(TINY, options.rounds, options.steps, options.only, compiled=True)))


if __name__ == "__main__":
    main()
