"""Figures 7, 8, 10 and 12 of the FlexFlow paper by simulation.

    python -m benchmarks.flexflow_figures                                 some minutes
    python -m benchmarks.flexflow_figures --figures 10 --models alexnet

    figures 7, 8   iterations per second on P100 and K80 by number of devices: data parallelism, the expert's strategy,
                   and what our search finds
    figure 10      our search beside the spaces of two others: REINFORCE's, in which every operator is whole and is only
                   placed, and OptCNN's, in which it is only cut (`benchmarks.optcnn`)
    figure 12      the best strategy over time of one chain, simulated from nothing (full) and by what changes (delta)

The figures are pictures, and no numbers of them are at hand. What the paper says in numbers stands beside ours: 1.3 to
3.3 times the throughput of data parallelism, about the same for ResNet-101, and at most 3.8 times that of "state of the
art approaches" (its abstract). What differs, and why:

- REINFORCE's space is searched here by our own search, which needs no measured steps: a step of REINFORCE's own
  strategies is not shorter than the best of its space. On four P100, that takes 2.9 to 4 times as long as ours for
  convolutional networks, whose operators have one long line, so that placing whole ones keeps one device busy.
- OptCNN adds up what runs at the same time in truth, as if gradients were exchanged before the next operator computes.
  On four P100 it loses at most 3% by that: with NVLink at its nominal rate, data parallelism computes nearly all the
  time, and OptCNN finds it or what is near it. It is for convolutional networks only.
- Over several nodes, gains depend on what of the links is reached. With nominal rates AlexNet gains 3 times on 16 P100.
  With --effective, links are as slow as in the simulator that the authors published; after a second of search NMT then
  gains 3.2 times on four P100, and 9 to 10 times on more, and ResNet-101 2.2 times, with a strategy that stays within
  a node: data parallelism there waits for its exchange of gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random
from time import process_time

from fxpipe.ir.units import show_seconds
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.expert_strategies import data_parallel, expert, model_parallel, one_device, scattered
from fxpipe.planning.operators.models.published_models import MODELS
from fxpipe.planning.operators.operator_costs import estimated, once
from fxpipe.planning.operators.strategy_search import TEMPERATURE, search

from .full_simulation import FullCore
from .optcnn import optcnn
from .strategy_search import published
from .tables import Row, show

CONVOLUTIONAL = ("alexnet", "resnet", "inception")  # those that OptCNN is for
CLUSTERS = ("p100:4", "p100:8", "p100:16", "k80:4", "k80:16", "k80:64")

# Figures 7 and 8 ------------------------------------------------------------------------------------------------------

HEADS_7 = ("model", "devices", "data par., it/s", "expert", "found", "times data par.", "paper")


def iterations(name: str, where: str, effective: bool, seconds: float) -> Row:
    """Iterations per second of data parallelism, of the expert's strategy, and of what is found in `seconds`."""
    graph, cluster, cost = MODELS[name](), published(where, effective), once(estimated())
    devices = len(cluster.devices)
    found = search(graph, cluster, cost, budget=seconds, progress=False, finish=False)
    known = (data_parallel(graph, devices), expert(graph, devices))
    core = Core(graph, cluster, cost, known)
    plain, skilled = map(core.begin, known)
    told = "about 1" if name == "resnet" else "1.3 to 3.3"
    return name, where, 1 / plain, 1 / skilled, 1 / found.seconds, plain / found.seconds, told


# Figure 10 ------------------------------------------------------------------------------------------------------------

HEADS_10 = ("model", "devices", "space", "its best step", "ours", "times", "paper")


def spaces(name: str, where: str, effective: bool, seconds: float) -> Iterator[Row]:
    """The best step of REINFORCE's space, and for convolutional networks of OptCNN's, beside what is found in all."""
    graph, cluster, cost = MODELS[name](), published(where, effective), once(estimated())
    devices = len(cluster.devices)
    found = search(graph, cluster, cost, budget=seconds, progress=False, finish=False)
    whole = {"model parallel": model_parallel(graph, devices), "one device": one_device(graph)}
    placed = search(graph, cluster, cost, seconds, starts=whole, roles="", progress=False, finish=False)
    steps = {"REINFORCE's": placed.seconds}
    if name in CONVOLUTIONAL:
        cut, _ = optcnn(graph, cluster, cost)
        steps["OptCNN's"] = Core(graph, cluster, cost, (cut,)).begin(cut)
    for space, step in steps.items():
        times = step / found.seconds
        yield name, where, space, show_seconds(step), show_seconds(found.seconds), times, "at most 3.8"


# Figure 12 ------------------------------------------------------------------------------------------------------------

HEADS_12 = ("model", "devices", "proposals", "best step", "full, s", "delta, s", "full / delta")


def over_time(name: str, where: str, seconds: float) -> Iterator[Row]:
    """The best step of a chain of proposals, and the seconds of the processor until then by both simulations; until
    the full one has taken `seconds`."""
    graph, cluster = MODELS[name](), published(where, effective=False)
    start = scattered(graph, len(cluster.devices), Random(1))
    full, delta = (FullCore(graph, cluster, estimated(), (start,), capacity=1 << 20) for _ in range(2))
    temperature = TEMPERATURE * delta.begin(start)
    full.begin(start)
    full.walk_from_nothing(0, temperature)  # compiled, or read from disk
    delta.explore(0, temperature)
    took, proposals, steps = [0.0, 0.0], 0, 16
    while took[0] < seconds:
        for at, walk in enumerate((full.walk_from_nothing, delta.explore)):
            began = process_time()
            walk(steps, temperature)
            took[at] += process_time() - began
        if full.seconds != delta.seconds or full.random[0] != delta.random[0]:
            raise RuntimeError(f"the chains of {name} on {where} differ: {full.seconds} and {delta.seconds}")
        proposals, steps = proposals + steps, 2 * steps
        yield name, where, proposals, show_seconds(delta.best[1]), *took, took[0] / max(took[1], 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", type=int, choices=(7, 8, 10, 12), default=[7, 8, 10, 12])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each search")
    parser.add_argument("--effective", action="store_true", help="links as in the authors' simulator")
    given = parser.parse_args()
    for figure, kind in ((7, "p100"), (8, "k80")):
        if figure in given.figures:
            where = [one for one in CLUSTERS if one.startswith(kind)]
            cells = ((name, one) for name in given.models for one in where)
            rows = (iterations(*cell, given.effective, given.seconds) for cell in cells)
            show(f"Figure {figure}: iterations per second", HEADS_7, rows)
    if 10 in given.figures:
        rows = (row for name in given.models for row in spaces(name, "p100:4", given.effective, given.seconds))
        show("Figure 10: the best step of other spaces, and of ours", HEADS_10, rows)
    if 12 in given.figures:
        rows = (row for name in given.models for row in over_time(name, "p100:16", given.seconds))
        show("Figure 12: the best step over time, by full and by delta simulation", HEADS_12, rows)


if __name__ == "__main__":
    main()
