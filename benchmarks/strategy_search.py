"""How good the strategies are that a search finds: beside the published Markov chain in the same time, and beside data
parallelism.

    python -m benchmarks.strategy_search --seconds 10             leaps and mcmc, medians over the seeds
    python -m benchmarks.strategy_search --against-data-parallel  as figures 7 and 8 of the FlexFlow paper

Both methods have all of their time for exploring and polishing; the chain gets what leaps took, if that was more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from time import monotonic

from fxpipe.ir.clusters import preset
from fxpipe.ir.operators import OperatorGraph
from fxpipe.ir.units import show_seconds
from fxpipe.soap.models import MODELS
from fxpipe.soap.search import search

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Searches for strategies.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each search")
    parser.add_argument("--seeds", type=int, default=3, help="number of searches by each method")
    given = parser.parse_args()
    for row in compare(given.models, given.devices, given.seconds, given.seeds):
        print("  ".join(f"{one:>10}" for one in row), flush=True)


if __name__ == "__main__":
    main()
