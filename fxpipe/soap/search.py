"""Searching for a fast strategy: the SOAP paper's Markov chain, then single changes until none is an improvement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any

from tqdm import tqdm

from fxpipe.ir.cluster import Cluster
from fxpipe.ir.operators import OperatorGraph
from fxpipe.ir.strategy import Strategy
from fxpipe.ir.units import show_seconds

from .core import Core
from .costs import Cost, roofline
from .strategies import data_parallel, expert, scattered

TEMPERATURE = 0.01  # of the start's seconds: a step slower by this much is taken once in e times
SLICE = 0.1  # seconds between two looks at the clock


@dataclass(frozen=True)
class Found:
    """The best strategy of a search, the seconds of its step, whether it is known that no single change makes it
    faster, how many strategies were tried, and the trace: after how many seconds of searching the best known step took
    how long. `starts` are the seconds of what it began with."""

    strategy: Strategy
    seconds: float
    local_optimum: bool
    proposals: int
    trace: tuple[tuple[float, float], ...]
    starts: tuple[tuple[str, float], ...]


def starting(graph: OperatorGraph, devices: int, seed: int, roles: str = "SAP") -> dict[str, Strategy]:
    """Where the paper starts from: data parallelism, the expert's strategy, and a random one."""
    return {
        "data parallel": data_parallel(graph, devices),
        "expert": expert(graph, devices),
        "random": scattered(graph, devices, Random(seed), roles),
    }


def search(
    graph: OperatorGraph,
    cluster: Cluster,
    cost: Cost | None = None,
    budget: float = 60.0,
    seed: int = 0,
    starts: Mapping[str, Strategy] | None = None,
    temperature: float = TEMPERATURE,
    roles: str = "SAP",
    progress: bool = True,
) -> Found:
    """The best strategy found in `budget` seconds. Two thirds of it go to chains, an equal share for each start, which
    ends early once half of it has passed without a better strategy. The best of all is then given to `polish`, which
    has the time that is left.

    `cost` are the seconds of parts, estimated where it is not given; `roles` are the dimensions that may be cut,
    besides as in the starts.
    """
    if budget <= 0:
        raise ValueError(f"a search of {budget} seconds finds nothing; give it a budget above 0")
    given = starting(graph, len(cluster.devices), seed, roles) if starts is None else dict(starts)
    if not given:
        raise ValueError("there is no strategy to start from")
    core = Core(graph, cluster, cost or roofline(), given.values(), roles, seed)
    _compile(core, next(iter(given.values())))
    begun = monotonic()
    trace: list[tuple[float, float]] = []
    costs: list[tuple[str, float]] = []
    ends: list[tuple[Strategy, float]] = []
    proposals = 0
    bar: tqdm[Any]
    with tqdm(total=len(given) + 1, desc="search", unit="start", disable=not progress) as bar:
        for name, start in given.items():
            costs.append((name, core.begin(start)))
            trace.append((monotonic() - begun, core.seconds))
            proposals += _chain(core, budget / len(given) * 2 / 3, temperature * core.seconds, begun, trace, bar)
            ends.append(core.best)
            bar.update()
        core.begin(min(ends, key=lambda end: end[1])[0])
        tried, optimum = polish(core, begun + budget - monotonic())
        trace.append((monotonic() - begun, core.seconds))
        bar.update()
    return Found(core.strategy, core.seconds, optimum, proposals + tried, tuple(_falling(trace)), tuple(costs))


def _compile(core: Core, start: Strategy) -> None:
    """What the search calls is compiled when it is called first; that is not part of the budget."""
    core.begin(start)
    core.walk(1, core.seconds)
    core.improve(0)


def _chain(
    core: Core, budget: float, temperature: float, begun: float, trace: list[tuple[float, float]], bar: tqdm[Any]
) -> int:
    """Walk until the budget is spent, or half of it has passed without an improvement. Returns the steps taken."""
    start = last = monotonic()
    steps, done = 16, 0
    while (now := monotonic()) - start < budget and now - last < budget / 2:
        improved = core.walk(steps, temperature)
        took = max(monotonic() - now, 1e-6)
        if improved:
            last = monotonic()
            trace.append((last - begun, improved[-1][1]))
        done += steps
        steps = max(1, min(int(steps * SLICE / took), 8 * steps))
        bar.set_postfix_str(f"best {show_seconds(core.best[1])}, {done} tried")
    return done


def polish(core: Core, budget: float = float("inf")) -> tuple[int, bool]:
    """Change single operators to their best configs, in turn, until no change is an improvement: a local optimum. Ends
    early once `budget` seconds have passed. Returns how many strategies were tried, and whether it is an optimum."""
    end = monotonic() + budget
    i = unchanged = tried = 0
    p = core.problem
    while unchanged < p.n and monotonic() < end:
        unchanged = 0 if core.improve(i) else unchanged + 1
        tried += int(p.choice_first[p.row_first[i + 1]] - p.choice_first[p.row_first[i]])
        i = (i + 1) % p.n
    return tried, unchanged == p.n


def is_local_optimum(core: Core) -> bool:
    """Whether no change of a single operator makes the strategy that the core is at faster."""
    strategy = core.strategy
    better = any(core.improve(i) for i in range(core.problem.n))
    core.begin(strategy)
    return not better


def best_of_all(graph: OperatorGraph, cluster: Cluster, cost: Cost | None = None, roles: str = "SAP") -> Found:
    """The fastest strategy of the whole space, for small ones."""
    start = data_parallel(graph, len(cluster.devices))
    core = Core(graph, cluster, cost or roofline(), (start,), roles)
    begun = monotonic()
    first = core.begin(start)
    tried = core.exhaust()
    strategy, seconds = core.best
    return Found(strategy, seconds, True, tried, ((monotonic() - begun, seconds),), (("data parallel", first),))


def _falling(trace: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Only what was better than all before."""
    found: list[tuple[float, float]] = []
    for at, seconds in trace:
        if not found or seconds < found[-1][1]:
            found.append((at, seconds))
    return found
