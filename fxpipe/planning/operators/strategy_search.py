"""Searching for a fast strategy: a chain of changes, then single changes until none is an improvement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from random import Random
from time import monotonic
from typing import Any

from tqdm import tqdm

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.ir.units import show_bytes, show_seconds

from .compiled_core import Core
from .expert_strategies import data_parallel, expert, megatron, model_parallel, one_device, scattered
from .models.operator_kinds import features, linear
from .operator_costs import Cost, estimated
from .strategy_memory import held

TEMPERATURE = 0.01  # of the start's seconds: a change that costs as much is kept with probability 1 / e
COOLED = 0.01  # of the temperature, in the end
MOST_LEAPS = 0.8  # of the steps in the beginning
OVERFULL = 10.0  # times the slowest start's seconds count for a strategy that does not fit in memory
ROUNDED = 1 - 1e-6  # of the memory is used: sums of bytes have rounding errors
SLICE = 0.1  # seconds between two looks at the clock
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}"


@dataclass(frozen=True)
class Found:
    """The result of a search.

    - `strategy`: the best one found.
    - `seconds`: of its step.
    - `local_optimum`: whether it is known that no single change makes it faster.
    - `proposals`: how many strategies were tried.
    - `trace`: (seconds since the search began, seconds of the best step by then), for each improvement.
    - `starts`: the strategies it began with, by name, and the seconds of their steps.
    """

    strategy: Strategy
    seconds: float
    local_optimum: bool
    proposals: int
    trace: tuple[tuple[float, float], ...]
    starts: tuple[tuple[str, float], ...]


def starting(graph: OperatorGraph, devices: int, seed: int, roles: str = "SAP") -> dict[str, Strategy]:
    """The starts of the SOAP paper: data parallelism, the expert's strategy, and a random one. Where regions may have
    several holders, tensor parallelism is one, too."""
    more = {"tensor parallel": megatron(graph, devices)} if "R" in roles else {}
    return more | {
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
    method: str = "leaps",
    finish: bool = True,
    copies: float | None = None,
) -> Found:
    """The best strategy found in `budget` seconds. Two thirds of them go to exploring, by `method`:

    - "leaps": from the best start, changes of single operators and leaps, which change a window of them
      (`block_moves`). It begins with many leaps at a high temperature, and ends with few at a low one. Without
      `starts`, model parallelism and one device are starts, too.
    - "mcmc": as published, a chain of single changes at one temperature from each start. All starts get an equal share
      of the time; a chain ends early once half of its share has passed without a better strategy.

    `polish` then improves the best strategy to a local optimum, for as long as it takes, or, if `finish` is false,
    until the budget is spent.

    `cost` gives the seconds of parts, by default estimates; `temperature` is relative to the start's seconds; `roles`
    are those of dimensions that may be cut (`strategy_space`). With `copies`, bytes in memory for each byte of weights,
    only strategies that fit in the memory of all devices are found. Raises ValueError for a budget, method or starts
    that cannot be, and if no strategy was found that fits.
    """
    if budget <= 0:
        raise ValueError(f"a search of {budget} seconds finds nothing; give it a budget above 0")
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; there are {', '.join(METHODS)}")
    given = dict(starts) if starts is not None else starting(graph, len(cluster.devices), seed, roles)
    if starts is None and method == "leaps":
        given |= {"model parallel": model_parallel(graph, len(cluster.devices)), "one device": one_device(graph)}
    if not given:
        raise ValueError("there is no strategy to start from")
    compile_core()
    core = Core(graph, cluster, cost or estimated(), given.values(), roles, seed, copies=copies or 0.0)
    costs = {name: core.begin(start) for name, start in given.items()}
    overfull = OVERFULL * max(costs.values())
    if copies is not None:
        core.hold_in_memory((ROUNDED * device.memory for device in cluster.devices), overfull)
        costs = {name: core.begin(start) for name, start in given.items()}
    log = Log(costs.values())
    with tqdm(total=budget, desc="search", unit="s", disable=not progress, bar_format=BAR) as log.bar:
        best, explored = METHODS[method](core, given, costs, budget * 2 / 3, temperature, log)
        core.begin(best)
        tried, optimum = polish(core, inf if finish else budget - log.passed, log)
    if copies is not None:
        _check_memory(graph, cluster, core.strategy, copies, explored + tried)
    trace = tuple(one for one in log.trace if copies is None or one[1] < overfull)
    return Found(core.strategy, core.seconds, optimum, explored + tried, trace, tuple(costs.items()))


@cache
def compile_core() -> None:
    """Compile the core, or read from disk what an earlier process compiled, so that it takes no time of a budget."""
    x = features("x", 1, 1)
    graph = OperatorGraph("one layer", (x, linear("y", x, 1)))
    start = data_parallel(graph, 1)
    core = Core(graph, Cluster.of(["cpu:0"]), estimated(), (start,))
    seconds = core.begin(start)
    core.explore(1, seconds, 0.5)
    core.improve(0)


def _check_memory(graph: OperatorGraph, cluster: Cluster, best: Strategy, copies: float, tried: int) -> None:
    """Raise ValueError if the best strategy does not fit in the memory of a device."""
    needs = zip(held(graph, best, len(cluster.devices), copies), cluster.devices, strict=True)
    need, device = max(needs, key=lambda one: one[0] / one[1].memory)
    if need > device.memory:
        raise ValueError(
            f"no strategy for {graph.name} was found that fits in memory, of {tried:,} tried: the one that lacks least "
            f"needs {show_bytes(need)} on {device.label}, which has {show_bytes(device.memory)}, with {copies:g} bytes "
            "for each byte of parameters; use more devices, or a smaller batch, parameter_copies or dtype"
        )


class Log:
    """The progress of a search: the trace of the best seconds, and a progress bar."""

    def __init__(self, starts: Iterable[float]) -> None:
        self.begun = monotonic()
        self.trace: list[tuple[float, float]] = [(0.0, min(starts))]
        self.bar: tqdm[Any] = tqdm(disable=True)

    @property
    def passed(self) -> float:
        """Seconds since the search began."""
        return monotonic() - self.begun

    def __call__(self, seconds: float, doing: str) -> None:
        """Note the seconds of a strategy, and show what is being done."""
        if seconds < self.trace[-1][1]:
            self.trace.append((self.passed, seconds))
        self.bar.n = min(self.passed, self.bar.total or 0.0)
        self.bar.set_postfix_str(f"{doing}, best {show_seconds(self.trace[-1][1])}")


def _leaps(
    core: Core, starts: Mapping[str, Strategy], costs: Mapping[str, float], budget: float, hot: float, log: Log
) -> tuple[Strategy, int]:
    """One chain that cools down, from the best start. Returns the best strategy, and how many were tried."""
    name = min(costs, key=costs.__getitem__)
    core.begin(starts[name])
    start, tried, steps = monotonic(), 0, 16
    while (done := (monotonic() - start) / budget) < 1:
        began = monotonic()
        core.explore(steps, hot * costs[name] * COOLED**done, MOST_LEAPS * (1 - done))
        tried += steps
        steps = _next_steps(steps, monotonic() - began)
        log(core.best[1], f"{tried:,} tried")
    return core.best[0], tried


def _mcmc(
    core: Core, starts: Mapping[str, Strategy], costs: Mapping[str, float], budget: float, hot: float, log: Log
) -> tuple[Strategy, int]:
    """The published chains. Returns the best strategy of all, and how many were tried."""
    ends: list[tuple[Strategy, float]] = []
    tried = 0
    for name, strategy in starts.items():
        core.begin(strategy)
        each = budget / len(starts)
        start = last = monotonic()
        steps = 16
        while (now := monotonic()) - start < each and now - last < each / 2:
            if core.explore(steps, hot * costs[name]):
                last = monotonic()
            tried += steps
            steps = _next_steps(steps, monotonic() - now)
            log(core.best[1], f"from {name}, {tried:,} tried")
        ends.append(core.best)
    return min(ends, key=lambda end: end[1])[0], tried


METHODS = {"leaps": _leaps, "mcmc": _mcmc}


def _next_steps(steps: int, took: float) -> int:
    """How many steps to take until the next look at the clock."""
    return max(1, min(int(steps * SLICE / max(took, 1e-6)), 8 * steps))


def polish(core: Core, budget: float = inf, log: Callable[[float, str], None] | None = None) -> tuple[int, bool]:
    """Change single operators to their best configs, in turn, until no change is an improvement: a local optimum. Ends
    early once `budget` seconds have passed. Returns how many strategies were tried, and whether it is an optimum."""
    end = monotonic() + budget
    i = unchanged = tried = 0
    p = core.problem
    while unchanged < p.n and monotonic() < end:
        unchanged = 0 if core.improve(i) else unchanged + 1
        tried += int(p.choice_first[p.row_first[i + 1]] - p.choice_first[p.row_first[i]])
        i = (i + 1) % p.n
        if log:
            log(core.seconds, f"{unchanged} of {p.n} operators are at their best")
    return tried, unchanged == p.n
