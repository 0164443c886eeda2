"""Table 4 of the FlexFlow paper: how much faster a search is that simulates what a proposal changes (delta) than one
that simulates every strategy from nothing (full). `python -m benchmarks.flexflow`, some minutes.

Both walk the same chains, from ten random strategies: the same proposals, kept and refused alike. Times are of the
processor; what is read from disk or compiled, and the simulation of the start, are left out.

    model  devices  proposals  full    delta   each            ratio          paper      simulation
                               search time,    delta,          full / delta   published  ratio without making or
                               all starts      one proposal                              updating the task graph

The paper's ratios are of searches of up to half an hour on one core of a Xeon E5-2600; here each search is broken off
after some proposals. The time of the simulation alone is what a search takes longer that does each one twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import process_time

from fxpipe.ir.cluster.published_clusters import k80s, p100s
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.ir.units import show_seconds
from fxpipe.planning.operators.compiled.flat_arrays import Ints
from fxpipe.planning.operators.expert_strategies import scattered
from fxpipe.planning.operators.models.published_models import MODELS
from fxpipe.planning.operators.operator_costs import estimated
from fxpipe.planning.operators.strategy_search import TEMPERATURE

from .full_simulation import FullCore
from .tables import show

Walk = Callable[[int, float], object]

DEVICES = (4, 8, 16, 32, 64)
PAPER = {  # full divided by delta, for each of DEVICES
    "alexnet": (2.9, 3.0, 2.9, 3.0, 3.0),
    "resnet": (3.2, 3.2, 3.1, 3.2, 3.3),
    "inception": (3.4, 3.9, 5.0, 5.9, 6.9),
    "rnntc": (2.2, 2.3, 2.4, 2.6, 3.0),
    "rnnlm": (2.3, 2.5, 2.7, 3.2, 3.6),
    "nmt": (2.5, 2.7, 3.0, 3.8, 4.1),
}


@dataclass(frozen=True)
class Cell:
    """Seconds of searches with the same proposals; `simulating` is the part of `full` and `delta` that simulates."""

    proposals: int
    full: float
    delta: float
    simulating: tuple[float, float]


def cell(name: str, devices: int, seconds: float, starts: int) -> Cell:
    """A cell of the table; the searches by delta from all starts together take about this many seconds."""
    graph = MODELS[name]()
    cluster = p100s(devices // 4) if devices <= 16 else k80s(devices // 4)
    core = FullCore(graph, cluster, estimated(), capacity=1 << 23 if devices > 16 else 1 << 20)
    search(core, scattered(graph, devices, Random(0)), 0, 0.0)  # compiled, or read from disk
    found = [search(core, scattered(graph, devices, Random(n)), n, seconds / starts) for n in range(1, starts + 1)]
    return Cell(
        sum(one.proposals for one in found),
        sum(one.full for one in found),
        sum(one.delta for one in found),
        (sum(one.simulating[0] for one in found), sum(one.simulating[1] for one in found)),
    )


def search(core: FullCore, start: Strategy, seed: int, seconds: float) -> Cell:
    """Walk by delta for this long, then the same chain from nothing, and both again with two simulations of each."""
    core.begin(start)
    temperature, random = TEMPERATURE * core.seconds, core.random + seed
    core.random[:] = random
    proposals, steps, began = 0, 1, process_time()
    while process_time() - began < seconds:
        core.explore(steps, temperature)
        proposals, steps = proposals + steps, 2 * steps
    once, times, ends = core.problem, [], set()
    for problem in (once, once._replace(simulations=2)):
        core.problem = problem
        for walk in (core.walk_from_nothing, core.explore):
            times.append(chain(core, walk, start, random, proposals, temperature))
            ends.add((core.seconds, int(core.random[0])))
    core.problem = once
    if len(ends) > 1:
        raise RuntimeError(f"chains of {core.graph.name} on {core.devices} devices differ: {ends}")
    full, delta, full_twice, delta_twice = times
    return Cell(proposals, full, delta, (full_twice - full, delta_twice - delta))


def chain(core: FullCore, walk: Walk, start: Strategy, random: Ints, proposals: int, temperature: float) -> float:
    """The seconds of the processor that the chain takes."""
    core.begin(start)
    core.random[:] = random
    times = []
    for steps in (0, proposals):  # with none: what the call itself takes
        began = process_time()
        walk(steps, temperature)
        times.append(process_time() - began)
    return times[1] - times[0]


def row(name: str, devices: int, seconds: float, starts: int) -> tuple[str, ...]:
    one, paper = cell(name, devices, seconds, starts), PAPER[name][DEVICES.index(devices)]
    times = (show_seconds(one.full), show_seconds(one.delta), show_seconds(one.delta / one.proposals))
    full, delta = one.simulating
    return (
        name,
        str(devices),
        str(one.proposals),
        *times,
        f"{one.full / one.delta:.1f}",
        f"{paper:.1f}",
        f"{full / delta:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Table 4 of the FlexFlow paper.")
    parser.add_argument("--models", nargs="+", choices=PAPER, default=list(PAPER))
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=list(DEVICES))
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of search by delta for each cell, all starts together"
    )
    parser.add_argument("--starts", type=int, default=10, help="random strategies to search from")
    given = parser.parse_args()
    heads = ("model", "devices", "proposals", "full", "delta", "each", "ratio", "paper", "simulation")
    cells = ((name, devices) for name in given.models for devices in given.devices)
    show("Table 4: full and delta simulation", heads, (row(*one, given.seconds, given.starts) for one in cells))


if __name__ == "__main__":
    main()
