"""How good the strategies are that a search finds: beside the published Markov chain in the same time, and beside data
parallelism.

    python -m benchmarks.strategy_search --seconds 10             leaps and mcmc, medians over the seeds
    python -m benchmarks.strategy_search --against-data-parallel  as figures 7 and 8 of the FlexFlow paper
    python -m benchmarks.strategy_search --exhaustive             is what is found the optimum of small models?

Those small models have few strategies enough to leave out none: on runs of neighbouring devices, the space that is
searched; or with --anywhere on any devices, which is far more.

Both methods have all of their time for exploring and polishing; the chain gets what leaps took, if that was more.

The paper measured 1.3 to 3.3 times the throughput of data parallelism, and about the same for ResNet-101. Here a step
is simulated with nominal rates of links, and gradients are exchanged behind the backward pass as far as that goes. "at
most" is what no strategy can exceed: the step of data parallelism by the least computation of all operators, shared by
all devices. Where it is near 1, data parallelism computes all the time. What programs of 2018 reached of the links was
less: with --effective, they are as in the simulator that the authors published, 4 MiB/ms in a node and 1 MiB/ms
between.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from statistics import median
from time import monotonic, process_time

import numpy as np

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.published_clusters import k80s, p100s, preset
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.units import show_bytes, show_seconds
from fxpipe.planning.operators.compiled.flat_arrays import problem
from fxpipe.planning.operators.compiled_core import Core
from fxpipe.planning.operators.expert_strategies import data_parallel, expert
from fxpipe.planning.operators.models.convolutional_networks import lenet
from fxpipe.planning.operators.models.published_models import MODELS
from fxpipe.planning.operators.models.recurrent_networks import rnnlm
from fxpipe.planning.operators.operator_costs import estimated, once
from fxpipe.planning.operators.strategy_search import search
from fxpipe.planning.operators.task_graph import tasks

from .exhaustive_search import best_of_all, choices

SMALL = {"LeNet": lenet, "RNNLM": partial(rnnlm, steps=2)}
SAME = 1e-9  # part of the seconds by which two simulated steps may differ and be the same

Row = tuple[str, ...]


def against_chain(graph: OperatorGraph, devices: int, seconds: float, seeds: Iterable[int]) -> tuple[float, float]:
    """The seconds of a step by leaps and by the chain, medians over the seeds."""
    cluster = preset(f"p100:{devices}")
    leaps, chains = [], []
    for seed in seeds:
        began = monotonic()
        leaps.append(search(graph, cluster, budget=seconds, seed=seed, progress=False, finish=False).seconds)
        same = max(seconds, monotonic() - began)
        chain = search(graph, cluster, budget=same, seed=seed, progress=False, method="mcmc", finish=False)
        chains.append(chain.seconds)
    return median(leaps), median(chains)


def verdict(ours: float, theirs: float) -> str:
    """Whether a step of `ours` is better than one of `theirs`.

    >>> verdict(1.0, 2.0), verdict(1.0, 1.0), verdict(2.0, 1.0)
    ('better', 'the same', 'worse')
    """
    if abs(ours - theirs) <= SAME * theirs:
        return "the same"
    return "better" if ours < theirs else "worse"


def summary(verdicts: Sequence[tuple[str, str]]) -> str:
    """One line for all cells, of (model, verdict).

    >>> summary([("nmt", "better"), ("nmt", "the same"), ("alexnet", "the same")])
    'leaps: worse in 0 of 3 cells; better in 1, of 1 of 2 models'
    """
    better = [model for model, one in verdicts if one == "better"]
    worse = sum(one == "worse" for _, one in verdicts)
    models = len({model for model, _ in verdicts})
    return (
        f"leaps: worse in {worse} of {len(verdicts)} cells; "
        f"better in {len(better)}, of {len(set(better))} of {models} models"
    )


def compare(models: Sequence[str], devices: Sequence[int], seconds: float, seeds: int) -> Iterator[Row]:
    """A row for each model and number of devices, and one that sums up."""
    yield "model", "devices", "mcmc", "leaps", "ratio", ""
    verdicts = []
    for name in models:
        for count in devices:
            ours, theirs = against_chain(MODELS[name](), count, seconds, range(seeds))
            verdicts.append((name, verdict(ours, theirs)))
            yield name, str(count), show_seconds(theirs), show_seconds(ours), f"{theirs / ours:.3f}", verdicts[-1][1]
    yield (summary(verdicts),)


EFFECTIVE = {"within": 4 * 2**20 * 1e3, "between": 2**20 * 1e3}  # bytes per second
CLUSTERS = ("p100:4", "p100:16", "k80:4", "k80:16", "k80:64")


def published(name: str, effective: bool) -> Cluster:
    """A cluster of the paper: "k80:16" is four nodes of K80s."""
    kind, _, devices = name.partition(":")
    make = {"p100": p100s, "k80": k80s}[kind]
    return make(int(devices) // 4, **(EFFECTIVE if effective else {}))


def least_computation(core: Core) -> float:
    """Seconds of computation, of all operators as they are cut best for that."""
    p, found = core.problem, 0.0
    whole = p.seconds.sum(axis=2)
    for i in range(p.n):
        rows = range(p.row_first[i], p.row_first[i + 1])
        found += min(whole[:, (at := p.seconds_first[row]) : at + p.row_parts[row]].sum(axis=1).min() for row in rows)
    return found


def against_data_parallel(name: str, where: str, cluster: Cluster, seconds: float) -> Row:
    """What a search finds, beside data parallelism and the experts' strategy. Bytes are counted by the plain simulator:
    a minute for large ones."""
    graph, cost, devices = MODELS[name](), once(estimated()), len(cluster.devices)
    found = search(graph, cluster, cost, budget=seconds, progress=False, finish=False)
    plain, skilled = data_parallel(graph, devices), expert(graph, devices)
    core = Core(graph, cluster, cost, (found.strategy, plain, skilled), capacity=1 << 18)
    steps, computed, sent = [], [], []
    for strategy in (plain, skilled, found.strategy):
        steps.append(core.begin(strategy))
        computed.append(float(core.state.device["load"].sum()))
        sent.append(sum(task.size for task in tasks(graph, cluster, strategy, cost)))
    most = steps[0] * devices / least_computation(core)
    return (
        *(name, where, *map(show_seconds, steps)),
        *(f"{steps[0] / steps[2]:.2f}", f"{most:.2f}", "about 1" if name == "resnet" else "1.3 to 3.3"),
        *(show_bytes(int(sent[0])), show_bytes(int(sent[2])), show_seconds(computed[0]), show_seconds(computed[2])),
    )


HEADS = ("model", "cluster", "data par.", "expert", "found", "times", "at most", "paper")
HEADS += ("bytes d.p.", "found", "comp. d.p.", "found")


def against_all(name: str, where: str, anywhere: bool, seconds: float) -> Row:
    """Whether the strategy found is the fastest of the whole space, and of how many strategies that is."""
    graph, cluster = SMALL[name](), preset(where)
    found = search(graph, cluster, budget=seconds, progress=False)
    began = process_time()
    best = best_of_all(graph, cluster, start=found.strategy, anywhere=anywhere)
    took = process_time() - began
    space = choices(problem(graph, cluster, once(estimated())), anywhere)
    count = prod(float(configs) for configs in np.diff(space.first))
    worth = verdict(found.seconds, best.seconds)
    on = "any" if anywhere else "runs"
    return name, where, on, f"{count:.1e}", f"{best.proposals:,}", show_seconds(took), worth


def main() -> None:
    parser = argparse.ArgumentParser(description="Searches for strategies.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each search")
    parser.add_argument("--seeds", type=int, default=3, help="number of searches by each method")
    parser.add_argument("--against-data-parallel", action="store_true", help="instead of the published chain")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=CLUSTERS, help="for that")
    parser.add_argument("--effective", action="store_true", help="links as in the authors' simulator")
    parser.add_argument("--exhaustive", action="store_true", help="small models on four devices, beside all strategies")
    parser.add_argument("--anywhere", action="store_true", help="for that: on any devices, which may take hours")
    given = parser.parse_args()
    if given.exhaustive:
        show(("model", "cluster", "devices", "strategies", "simulated", "seconds", "found is"))
        for name in SMALL:
            show(against_all(name, "p100:4", given.anywhere, given.seconds))
        return
    if given.against_data_parallel:
        show(HEADS)
        for where in given.clusters:
            for name in given.models:
                show(against_data_parallel(name, where, published(where, given.effective), given.seconds))
        return
    for row in compare(given.models, given.devices, given.seconds, given.seeds):
        show(row)


def show(row: Row) -> None:
    print("  ".join(f"{one:>10}" for one in row), flush=True)


if __name__ == "__main__":
    main()
