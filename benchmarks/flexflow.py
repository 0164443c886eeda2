"""Table 4 of the FlexFlow paper: how much faster a search is that simulates what a proposal changes (delta) than one
that simulates every strategy from nothing (full). `python -m benchmarks.flexflow`, some minutes.

Both walk the same chain: the same proposals, kept and refused alike. Times are of the processor, per proposal. "paper"
is the published ratio of search times on one core of a Xeon E5-2600, averaged over ten starts; here the start is one
random strategy, and its beginning is all that is walked.

    model    devices    proposals    full    delta    ratio    paper
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random
from time import process_time

from fxpipe.ir.clusters import k80s, p100s
from fxpipe.ir.units import show_seconds
from fxpipe.soap.core import Core
from fxpipe.soap.costs import roofline
from fxpipe.soap.models import MODELS
from fxpipe.soap.search import TEMPERATURE
from fxpipe.soap.strategies import scattered

DEVICES = (4, 8, 16, 32, 64)
PAPER = {  # full divided by delta, for each of DEVICES
    "alexnet": (2.9, 3.0, 2.9, 3.0, 3.0),
    "resnet": (3.2, 3.2, 3.1, 3.2, 3.3),
    "inception": (3.4, 3.9, 5.0, 5.9, 6.9),
    "rnntc": (2.2, 2.3, 2.4, 2.6, 3.0),
    "rnnlm": (2.3, 2.5, 2.7, 3.2, 3.6),
    "nmt": (2.5, 2.7, 3.0, 3.8, 4.1),
}


def cell(name: str, devices: int, seconds: float) -> tuple[int, float, float]:
    """The number of proposals, and the seconds of each in full and by delta."""
    graph = MODELS[name]()
    cluster = p100s(devices // 4) if devices <= 16 else k80s(devices // 4)
    core = Core(graph, cluster, roofline(), seed=1, capacity=1 << 23 if devices > 16 else 1 << 20)
    start = scattered(graph, devices, Random(1))
    temperature = TEMPERATURE * core.begin(start)
    core.walk(1, temperature)  # compiled, or read from disk
    core.walk_from_nothing(1, temperature)
    core.begin(start)
    began, proposals, steps = process_time(), 0, 10
    while process_time() - began < seconds:
        core.walk(steps, temperature)
        proposals, steps = proposals + steps, 2 * steps
    delta, random, found = process_time() - began, core.random.copy(), core.seconds
    again = Core(graph, cluster, roofline(), seed=1, capacity=len(core.state.message))
    again.begin(start)
    again.walk(1, temperature)
    again.walk_from_nothing(1, temperature)
    again.begin(start)
    began = process_time()
    again.walk_from_nothing(proposals, temperature)
    full = process_time() - began
    if again.seconds != found or again.random[0] != random[0]:
        raise RuntimeError(f"the two chains of {name} on {devices} devices differ")
    return proposals, full / proposals, delta / proposals


def rows(models: list[str], devices: list[int], seconds: float) -> Iterator[tuple[str, int, int, str, str, str, str]]:
    for name in models:
        for count in devices:
            proposals, full, delta = cell(name, count, seconds)
            paper = PAPER[name][DEVICES.index(count)]
            yield name, count, proposals, show_seconds(full), show_seconds(delta), f"{full / delta:.1f}", f"{paper:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Table 4 of the FlexFlow paper.")
    parser.add_argument("--models", nargs="+", choices=PAPER, default=list(PAPER))
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--seconds", type=float, default=1.0, help="of delta simulation for each cell")
    given = parser.parse_args()
    heads = ("model", "devices", "proposals", "full", "delta", "ratio", "paper")
    print("  ".join(f"{one:>10}" for one in heads))
    for row in rows(given.models, given.devices, given.seconds):
        print("  ".join(f"{one:>10}" for one in row), flush=True)


if __name__ == "__main__":
    main()
