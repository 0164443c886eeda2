"""What autograd keeps on each stage at the highest point of a training step, counted to the byte.

    python -m benchmarks.memory

Four stages that are alike, more and more micro-batches. GPipe runs all forwards first and keeps what all M of them
saved; with 1F1B stage i keeps at most K = n - i of them, whatever M is. With recomputation a stage keeps what it took
of each of these micro-batches, and what one of them saves while it is recomputed, of which what it took is a part. So
says the formula beside:

    everything kept    min(K, M) x saved
    recomputed         (min(K, M) - 1) x taken + saved

Counted are the tensors that autograd saves in a stage's forward (those in one place once, parameters never) and, in a
forward without autograd, those that the stage takes, each as long as something holds it.

The second table is of backward as code, ten models: see `predicted_bytes`.
"""

from __future__ import annotations

import argparse
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from benchmarks import predicted_bytes
from benchmarks.workload import Workload
from fxpipe.ir.units import show_bytes

WORK = Workload(stages=4, chunks=0, rows=8, width=64, depth=3)
CHUNKS = (4, 8, 16, 64)
CALL = "call, backward"  # `pipe(x)` and autograd's backward: GPipe's order
ROUTES = (CALL, "gpipe", "1f1b")  # the others are schedules of `pipe.step`
CHECKPOINTS = ("never", "always")


class Kept:
    """Memory that is kept as long as this object lives."""

    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.meter, self.tensor = meter, tensor.detach()
        meter.add(tensor.data_ptr(), tensor.nbytes)

    def __del__(self) -> None:
        self.meter.remove(self.tensor.data_ptr(), self.tensor.nbytes)


class Meter:
    """Counts what is kept for the backward of one stage: `now`, and `peak`. Only that stage's worker comes here."""

    def __init__(self, stage: nn.Module) -> None:
        self.own = {tensor.data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
        self.holders = Counter[int]()
        self.now = self.peak = 0
        run = stage.forward

        def forward(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                for tensor in args:
                    if isinstance(tensor, Tensor):
                        self.hold(tensor)
                return run(*args)
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(self, tensor), lambda kept: kept.tensor):
                return run(*args)

        stage.forward = forward

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor until nobody has it."""
        self.add(tensor.data_ptr(), tensor.nbytes)
        weakref.finalize(tensor, self.remove, tensor.data_ptr(), tensor.nbytes)

    def add(self, where: int, size: int) -> None:
        if where not in self.own and not self.holders[where]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self.holders[where] += 1

    def remove(self, where: int, size: int) -> None:
        self.holders[where] -= 1
        if where not in self.own and not self.holders[where]:
            self.now -= size


def counted(work: Workload, route: str, checkpoint: str) -> tuple[int, ...]:
    """Bytes per stage at the highest point of a training step."""
    pipe = fxpipe.compile(
        work.model(),
        devices=[f"cpu:{s}" for s in range(work.stages)],
        chunks=work.chunks,
        checkpoint=checkpoint,
        cut=[str(s) for s in range(1, work.stages)],
        schedule="gpipe" if route == CALL else route,
        backward="autograd",
    )
    x, y = work.batch()

    def step() -> None:
        if route == CALL:
            F.mse_loss(pipe(x), y).backward()
        else:
            pipe.step(x, target=y, loss_fn=F.mse_loss)

    try:
        step()  # compiles
        meters = [Meter(stage) for stage in pipe.stages]
        step()
        return tuple(meter.peak for meter in meters)
    finally:
        pipe.close()


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch on each stage: what autograd saves of it, and what the stage takes."""

    saved: tuple[int, ...]
    taken: tuple[int, ...]


def sizes(work: Workload) -> Sizes:
    """Of the model alone, without a pipeline."""
    x = replace(work, chunks=1).batch()[0]
    saved, taken = [], []
    for stage in work.model():
        meter = Meter(stage)
        taken.append(x.nbytes)
        x = stage(x).detach().requires_grad_()
        saved.append(meter.peak)
    return Sizes(tuple(saved), tuple(taken))


def formula(work: Workload, route: str, checkpoint: str, one: Sizes) -> tuple[int, ...]:
    """Bytes per stage by the formula at the top of this file. Within a `step`, the last stage has the loss, too: it
    takes the target and saves it."""
    if route != CALL:
        target = one.taken[-1]  # it has the shape of all that moves
        one = Sizes((*one.saved[:-1], one.saved[-1] + target), (*one.taken[:-1], one.taken[-1] + target))
    live = [min(work.stages - s if route == "1f1b" else work.chunks, work.chunks) for s in range(work.stages)]
    if checkpoint == "never":
        return tuple(k * saved for k, saved in zip(live, one.saved, strict=True))
    return tuple((k - 1) * taken + saved for k, saved, taken in zip(live, one.saved, one.taken, strict=True))


def rows(base: Workload, chunks: Sequence[int]) -> Iterator[tuple[str, ...]]:
    one = sizes(base)
    for checkpoint in CHECKPOINTS:
        for route in ROUTES:
            for number in chunks:
                work = replace(base, chunks=number)
                pairs = zip(counted(work, route, checkpoint), formula(work, route, checkpoint, one), strict=True)
                yield (checkpoint, route, str(number), *(beside(ours, expected) for ours, expected in pairs))


def beside(counted: int, expected: int) -> str:
    """
    >>> beside(4096, 4096), beside(5120, 4096)
    ('4.1 kB', '5.12 kB (4.1 kB)')
    """
    return show_bytes(counted) if counted == expected else f"{show_bytes(counted)} ({show_bytes(expected)})"


def table(base: Workload, chunks: Sequence[int]) -> str:
    """Bytes per stage; in brackets what the formula says, where that is something else."""
    headers = ("recompute", "", "M", *(f"stage {s}" for s in range(base.stages)))
    return tabulate(list(rows(base, chunks)), headers, disable_numparse=True, colalign=("left", "left", *["right"] * 5))


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes that autograd keeps on each stage, by schedule.")
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS, help="numbers of micro-batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(table(WORK, options.chunks))
    print('\nbackward="code": bytes predicted, and of a step\n')
    print(predicted_bytes.table())


if __name__ == "__main__":
    main()
