"""How well the simulator tells the time of a step, on two CPU workers: predicted beside measured.

    python -m benchmarks.simulator_accuracy
    python -m benchmarks.simulator_accuracy --plans     plans with and without tensor parallelism
    python -m benchmarks.simulator_accuracy --ranks     these plans over two processes

Workers that share caches and memory slow each other down, so what actions take is measured under the same load: each
worker runs its row of the schedule on real values and waits for nobody (`pipe.rehearse`, see
`fxpipe.engines.rehearsal`). The simulator then says when each action can start, and so how long the workers wait for
each other. No number is adjusted.

    workers   from the start of the first action to the end of the last: of the simulated timeline, and of that of a
              step that notes when its actions ran
    step      the whole call of `pipe.step`: before the workers begin, the batch is cut and handed out; after they have
              ended, the gradients are added to the model's. Predicted is what the workers take, and what a rehearsal
              took before and after

Rehearsals and steps take turns, and `off` is the median of all rounds. Each worker has one thread.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe
from benchmarks.models import ResNet
from fxpipe.demo.transformer import PixelTransformer
from fxpipe.demo.unet import UNet
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.timeline import Timeline, compare

WORKERS = ["cpu:0", "cpu:1"]
BAR = 0.15  # the error that is allowed
FAR = 1.1  # pairs of plans of which one takes this much longer must be told apart
TIE = 1.03  # plans as close as this are as fast as each other


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss; the modules that quarters of the work begin with, and the one where an uneven cut is
    made."""

    model: nn.Module
    x: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    quarters: tuple[str, str, str]
    uneven: str


@dataclass(frozen=True)
class Setting:
    """How a step is run."""

    cut: str  # "even" or "uneven"
    schedule: str
    checkpoint: str
    chunks: int

    def options(self, case: Case) -> dict[str, Any]:
        """For `fxpipe.compile`: two stages, or four to be dealt in turn."""
        quarters = list(case.quarters) if self.schedule == "interleaved" else [case.quarters[1]]
        return {
            "devices": WORKERS,
            "chunks": self.chunks,
            "schedule": self.schedule,
            "checkpoint": self.checkpoint,
            "cut": [case.uneven] if self.cut == "uneven" else quarters,
        }


@dataclass(frozen=True)
class PlanSetting:
    """A plan by `fxpipe.plan`: ops cut over both workers ("tensor parallel"), or a stage on each ("pipeline")."""

    cut: str
    checkpoint: str
    chunks: int
    schedule: str = "1f1b"

    def options(self, case: Case) -> dict[str, Any]:
        """For `fxpipe.compile`."""
        how: dict[str, Any] = {"tensor_parallel": 2} if self.cut == "tensor parallel" else {"planner": "straight"}
        where, rows = Cluster.of(WORKERS), len(case.x)
        recompute = self.checkpoint == "always"
        how |= {"example_inputs": (case.x,), "recompute": recompute, "schedule": self.schedule}
        return {"plan": fxpipe.plan(case.model, where, rows, micro_batches=self.chunks, **how)}


SETTINGS = (
    Setting("even", "gpipe", "never", 4),
    Setting("even", "gpipe", "always", 8),
    Setting("even", "1f1b", "never", 8),
    Setting("even", "1f1b", "always", 4),
    Setting("even", "zb-h1", "never", 8),
    Setting("even", "interleaved", "never", 8),
    Setting("uneven", "gpipe", "never", 8),
    Setting("uneven", "1f1b", "always", 8),
    Setting("uneven", "zb-h1", "never", 4),
)
PLANS = (
    PlanSetting("tensor parallel", "never", 1),
    PlanSetting("tensor parallel", "always", 4),
    PlanSetting("pipeline", "never", 8),
)


@dataclass(frozen=True)
class Result:
    """Seconds: what the workers take, as predicted and as measured; of each round, what the call takes, likewise.
    `spans` has both timelines side by side."""

    setting: Setting | PlanSetting
    workers: tuple[float, float]
    steps: Sequence[tuple[float, float]]
    spans: str = ""

    @property
    def step(self) -> tuple[float, float]:
        """What the call takes, as predicted and as measured."""
        return median(one for one, _ in self.steps), median(one for _, one in self.steps)

    @property
    def off(self) -> float:
        """How far the predicted step is from the measured one, as a part of that. In each round both are taken within
        seconds, as the machine may be slower in some than in others."""
        return median(predicted / measured for predicted, measured in self.steps) - 1


def cases() -> dict[str, Callable[[], Case]]:
    """Models of which a task takes several milliseconds; each is made when it is asked for."""
    return {"mlp": mlp, "resnet": resnet, "unet": unet, "transformer": transformer}


def mlp(width: int = 512, depth: int = 12, rows: int = 1024) -> Case:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
    quarters = str(depth // 4), str(depth // 2), str(3 * depth // 4)
    return Case(model, torch.randn(rows, width), torch.randn(rows, width), F.mse_loss, quarters, str(depth // 3))


def resnet(width: int = 16, size: int = 64, rows: int = 32) -> Case:
    images, labels = torch.randn(rows, 3, size, size), torch.randint(10, (rows,))
    quarters = "layers.2", "layers.4", "layers.6"
    return Case(ResNet((2, 2, 2, 2), width=width, classes=10), images, labels, F.cross_entropy, quarters, "layers.2")


def unet(channels: int = 16, size: int = 32, rows: int = 32) -> Case:
    images = torch.randn(rows, 1, size, size)
    noisy = images + torch.randn_like(images)
    return Case(UNet(channels), noisy, images, F.mse_loss, ("down3", "up3", "up1"), "up1")


def transformer(width: int = 128, length: int = 64, rows: int = 32) -> Case:
    pixels = torch.randint(17, (rows, length + 1))
    model = PixelTransformer(length=length, width=width, depth=8)
    quarters = "layers.2", "layers.4", "layers.6"
    return Case(model, pixels[:, :-1].contiguous(), pixels[:, 1:].contiguous(), next_pixel, quarters, "layers.2")


def next_pixel(scores: Tensor, levels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), levels.flatten())


class Trial:
    """A pipe of a case in a setting, and the times it took so far."""

    def __init__(self, case: Case, setting: Setting | PlanSetting) -> None:
        self.case, self.setting = case, setting
        self.model = copy.deepcopy(case.model)
        self.pipe = fxpipe.compile(self.model, **setting.options(case))
        self.pipe.step(case.x, target=case.target, loss_fn=case.loss)
        self.clear()

    def clear(self) -> None:
        self.predicted: list[Timeline] = []
        self.steps: list[float] = []
        self.measured: list[Timeline] = []

    def once(self) -> None:
        """A rehearsal, a step, and a step that notes when its actions ran."""
        self.model.zero_grad()
        case = self.case
        self.predicted.append(self.pipe.rehearse(case.x, target=case.target, loss_fn=case.loss, rounds=1))
        self.steps.append(self.step())
        self.step(timeline=True)
        self.measured.append(self.pipe.timeline)

    def step(self, timeline: bool = False) -> float:
        """Seconds of the call."""
        self.model.zero_grad()
        start = perf_counter()
        self.pipe.step(self.case.x, target=self.case.target, loss_fn=self.case.loss, timeline=timeline)
        return perf_counter() - start

    def result(self) -> Result:
        both = self.predicted, self.measured
        predicted, measured = (median(one.makespan for one in some) for some in both)
        calls = [end - start for start, end in (one.window for one in self.predicted)]
        spans = compare(*(sorted(some, key=lambda one: one.makespan)[(len(some) - 1) // 2] for some in both))
        return Result(self.setting, (predicted, measured), list(zip(calls, self.steps, strict=True)), spans)


def trials(case: Case, settings: Sequence[Setting | PlanSetting], rounds: int) -> list[Result]:
    """All settings in turn, in every round."""
    made = [Trial(case, setting) for setting in settings]
    gc.disable()
    try:
        for number in tqdm(range(rounds + 1), desc="rounds", leave=False):
            for trial in made:
                trial.once()
                if number == 0:  # warming up
                    trial.clear()
            gc.collect()
        return [trial.result() for trial in made]
    finally:
        gc.enable()
        for trial in made:
            trial.pipe.close()


def in_turn(
    models: Sequence[str], settings: Sequence[Setting | PlanSetting], rounds: int
) -> Iterator[tuple[str, list[Result]]]:
    """The results of each model."""
    torch.set_num_threads(1)
    for key in models:
        torch.manual_seed(0)
        yield key, trials(cases()[key](), settings, rounds)


def over_ranks(*arguments: Any) -> Iterator[tuple[str, list[Result]]]:
    """The results of each model, as rank 0 of two processes measures them."""
    context = get_context("spawn")
    ends = [context.Pipe() for _ in WORKERS]
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        processes = [
            context.Process(target=serve, args=(theirs, rank, str(Path(folder) / "meet"), arguments))
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(processes, ends, strict=True):
            process.start()
            theirs.close()
        with suppress(EOFError):
            while True:
                yield ends[0][0].recv()
        for process in processes:
            process.join()


def serve(end: Connection, rank: int, meeting: str, arguments: Sequence[Any]) -> None:
    """What each rank does: rank 0 sends what it measures."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=len(WORKERS))
    for found in in_turn(*arguments):
        if rank == 0:
            end.send(found)
    dist.barrier()


def table(results: Sequence[Result]) -> str:
    """A line for each setting, in milliseconds and percent."""
    rows = [
        (
            *(one.setting.cut, one.setting.schedule, one.setting.checkpoint, one.setting.chunks),
            *(f"{1e3 * seconds:.1f}" for seconds in one.workers),
            f"{one.workers[0] / one.workers[1] - 1:+.1%}",
            *(f"{1e3 * seconds:.1f}" for seconds in one.step),
            f"{one.off:+.1%}",
        )
        for one in results
    ]
    headers = ["cut", "schedule", "recompute", "chunks"]
    headers += ["workers\npredicted", "\nmeasured", "\noff", "step\npredicted", "\nmeasured", "\noff"]
    return tabulate(rows, headers, colalign=["left"] * 3 + ["right"] * 7, disable_numparse=True)


def verdict(results: Sequence[Result]) -> Iterator[str]:
    """Whether the errors are small, and whether the simulator chose well."""
    worst = max(results, key=lambda one: abs(one.off))
    inside = sum(abs(one.off) <= BAR for one in results)
    yield f"{inside} of {len(results)} within {BAR:.0%}; the worst is {worst.off:+.1%}"
    far = [(a, b) for a, b in combinations(results, 2) if max(a.step[1], b.step[1]) > FAR * min(a.step[1], b.step[1])]
    kept = sum((a.step[0] < b.step[0]) == (a.step[1] < b.step[1]) for a, b in far)
    yield f"order kept by {kept} of {len(far)} pairs that differ by more than {FAR - 1:.0%}"
    chosen, fastest = (min(results, key=lambda one: one.step[k]) for k in (0, 1))
    behind = chosen.step[1] / fastest.step[1]
    how = "the fastest" if chosen is fastest else f"{behind - 1:.1%} behind the fastest, {name(fastest.setting)}"
    yield f"simulated as fastest: {name(chosen.setting)}, measured {how}: {'good' if behind <= TIE else 'not good'}"


def name(setting: Setting | PlanSetting) -> str:
    return f"{setting.cut} {setting.schedule}, {setting.checkpoint}, {setting.chunks}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Simulated beside measured training steps, on two CPU workers.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=list(cases()), choices=list(cases()), help="models")
    parser.add_argument("--plans", action="store_true", help="plans, with and without tensor parallelism")
    parser.add_argument("--ranks", action="store_true", help="these plans over two ranks, each a process")
    parser.add_argument("--spans", action="store_true", help="show for each setting where prediction and truth differ")
    options = parser.parse_args(arguments)
    settings = PLANS if options.plans or options.ranks else SETTINGS
    measure = over_ranks if options.ranks else in_turn
    everything: list[Result] = []
    for key, results in measure(options.only, settings, options.rounds):
        everything += results
        print(f"\n{key}\n\n{table(results)}\n", *verdict(results), sep="\n")
        for one in results if options.spans else ():
            print(f"\n{name(one.setting)}\n{one.spans}")
    inside = sum(abs(one.off) <= BAR for one in everything)
    print(f"\nin all, {inside} of {len(everything)} steps within {BAR:.0%}")


if __name__ == "__main__":
    main()
