"""How well the simulator tells which strategy is faster, on two CPU workers: simulated beside measured steps.

    python -m benchmarks.strategies

Two convolutional networks and a recurrent one, each under data parallelism, model parallelism, the expert's strategy,
all on one worker, and strategies drawn at random. Parts are measured (`parts.py`), alone and beside others, what a
message takes and how fast memory is, too (`Cluster.detect`), and the simulator puts them together: the SOAP paper's
algorithm 1, for workers that share a memory (`benchmarks.contention`). No number is adjusted.
Strategies and parts take turns, and medians are compared. Each worker has one thread.

Two figures count: how far each simulated step is from the measured one, and whether of each two strategies whose
simulated steps differ by more than a tenth the one that is faster in simulation is so in truth.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from benchmarks.models import RNNTC, AlexNet, ResNet
from benchmarks.parts import Parts, parts_of
from benchmarks.timing import in_turn
from fxpipe.api.search import operators_of
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.planning.operators.expert_strategies import data_parallel, expert, model_parallel, scattered
from fxpipe.planning.operators.strategy_space import place

from .contention import simulate_shared

WORKERS = 2
BAR = 0.30  # the error that is allowed
CLEAR = 1.10  # strategies whose simulated steps differ by more have an order


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    model: nn.Module
    x: Tensor
    target: Tensor


@dataclass(frozen=True)
class Result:
    """Seconds of a step."""

    name: str
    simulated: float
    measured: float


def cases() -> dict[str, Callable[[], Case]]:
    """Models of which a part takes milliseconds; each is made when it is asked for."""
    return {"alexnet": alexnet, "resnet": resnet, "rnntc": rnntc}


def alexnet(width: int = 24, hidden: int = 1024, size: int = 127, rows: int = 32) -> Case:
    model = AlexNet(width=width, hidden=hidden, classes=100, size=size)
    return Case(model, torch.randn(rows, 3, size, size), torch.randint(100, (rows,)))


def resnet(width: int = 32, size: int = 96, rows: int = 32) -> Case:
    model = ResNet([1, 1, 1, 1], width=width, classes=100, norm=False)
    return Case(model, torch.randn(rows, 3, size, size), torch.randint(100, (rows,)))


def rnntc(width: int = 256, layers: int = 2, steps: int = 6, rows: int = 256) -> Case:
    model = RNNTC(vocab=1000, width=width, layers=layers, classes=10)
    return Case(model, torch.randint(1000, (rows, steps)), torch.randint(10, (rows,)))


def strategies(graph: OperatorGraph, drawn: int) -> dict[str, Strategy]:
    """Those that are compared, by name; `drawn` of them at random."""
    one = Strategy(tuple(place(operator, (1,) * len(operator.output), 0) for operator in graph))
    found = {"data parallel": data_parallel(graph, WORKERS), "model parallel": model_parallel(graph, WORKERS)}
    found |= {"expert": expert(graph, WORKERS), "one worker": one}
    return found | {f"random {seed}": scattered(graph, WORKERS, Random(seed)) for seed in range(drawn)}


def trials(case: Case, rounds: int, drawn: int) -> list[Result]:
    """Every strategy, simulated and measured. The first device of the cluster stands for both."""
    cluster = Cluster.detect(WORKERS)
    graph = operators_of(case.model, cluster, (case.x,), None)
    found = strategies(graph, drawn)
    parts = parts_of(graph, cluster, found.values())
    alone, beside = Parts(parts, 1), Parts(parts, WORKERS)
    pipes = {name: fxpipe.compile(copy.deepcopy(case.model), plan=(graph, one), devices=WORKERS)
             for name, one in found.items()}  # fmt: skip
    turns: dict[str, Callable[[], object]] = {name: _step(pipe, case) for name, pipe in pipes.items()}
    try:
        times = in_turn(turns | {"parts alone": alone.time_each, "parts beside": beside.time_each}, rounds, 1)
    finally:
        for pipe in pipes.values():
            pipe.close()
    costs = alone.cost(), beside.cost()
    simulated = {name: simulate_shared(graph, cluster, one, *costs) for name, one in found.items()}
    return [Result(name, simulated[name], median(times[name])) for name in found]


def _step(pipe: fxpipe.Pipe, case: Case) -> Callable[[], object]:
    def step() -> object:
        pipe.zero_grad()
        return pipe.step(case.x, target=case.target, loss_fn=F.cross_entropy)

    return step


def table(results: Sequence[Result]) -> str:
    """A line for each strategy, in milliseconds."""
    rows = [
        (one.name, f"{1e3 * one.simulated:.1f}", f"{1e3 * one.measured:.1f}", f"{one.simulated / one.measured:.2f}")
        for one in sorted(results, key=lambda one: one.simulated)
    ]
    headers = ("strategy", "simulated (ms)", "measured (ms)", "ratio")
    return tabulate(rows, headers, colalign=("left", "right", "right", "right"), disable_numparse=True)


def verdict(results: Sequence[Result]) -> Iterator[str]:
    """Whether the errors are small, and the order right."""
    inside = sum(abs(one.simulated / one.measured - 1) <= BAR for one in results)
    yield f"{inside} of {len(results)} within {BAR:.0%}"
    pairs = [sorted(pair, key=lambda one: one.simulated) for pair in combinations(results, 2)]
    clear = [(fast, slow) for fast, slow in pairs if slow.simulated > CLEAR * fast.simulated]
    wrong = [(fast, slow) for fast, slow in clear if fast.measured >= slow.measured]
    yield f"{len(clear) - len(wrong)} of {len(clear)} pairs that differ by more than {CLEAR - 1:.0%} are in order"
    for fast, slow in wrong:
        yield f"  {fast.name} is measured {fast.measured / slow.measured - 1:.0%} slower than {slow.name}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Simulated beside measured strategies, on two CPU workers.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--drawn", type=int, default=6, help="strategies drawn at random")
    parser.add_argument("--only", nargs="+", default=list(cases()), choices=list(cases()), help="models")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for key in options.only:
        results = trials(cases()[key](), options.rounds, options.drawn)
        print(f"\n{key}\n\n{table(results)}\n", *verdict(results), sep="\n")


if __name__ == "__main__":
    main()
