"""Searching for a fast strategy: a chain of changes, then single changes until none is an improvement.

Where memory may be too small, the same is tried in several ways: with each allowed number of micro-batches, and
recomputing nothing or all groups of operators (`strategy_space`). Half of the time for exploring goes to all ways
alike, the other half to the best. Single groups are then added to what is recomputed, or left out, as long as the step
gets faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from math import inf
from random import Random
from time import monotonic
from typing import Any

from tqdm import tqdm

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph, micro_batch
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.ir.units import show_bytes, show_seconds

from .compiled_core import Core
from .expert_strategies import data_parallel, expert, megatron, model_parallel, one_device, scattered
from .models.operator_kinds import features, linear
from .operator_costs import Cost, estimated
from .strategy_memory import held
from .strategy_space import Groups, groups

TEMPERATURE = 0.01  # of the start's seconds: a change that costs as much is kept with probability 1 / e
OVERFULL_TEMPERATURE = 0.3  # in place of it, if no start fits in memory: what lacks memory differs by much in cost
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
    - `local_optimum`: whether it is known that no single change makes it faster: of how one operator is cut and placed,
      or of whether one group is recomputed.
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
    micro_batches: Sequence[int] = (1,),
    recompute: bool = True,
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
    only strategies that fit in the memory of all devices are found; unless `recompute` is false, they may recompute.
    A step has one of the numbers of `micro_batches`: the least of them if every strategy fits in memory with it, since
    more of them are never faster. Raises ValueError for a budget, method, starts or micro-batches that cannot be, and
    if no strategy was found that fits.
    """
    if budget <= 0:
        raise ValueError(f"a search of {budget} seconds finds nothing; give it a budget above 0")
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; there are {', '.join(METHODS)}")
    if starts is not None and not starts:
        raise ValueError("there is no strategy to start from")
    if not micro_batches:
        raise ValueError("no number of micro-batches is allowed; write micro_batches=(1,)")
    compile_core()
    cost, devices = cost or estimated(), len(cluster.devices)
    least, *more = sorted(set(micro_batches))
    room = [ROUNDED * device.memory for device in cluster.devices]
    every = groups(graph) if recompute and copies is not None else ()

    def core_of(number: int) -> tuple[Core, dict[str, Strategy]]:
        part = micro_batch(graph, number)
        given = dict(starts) if starts is not None else starting(part, devices, seed, roles)
        if starts is None and method == "leaps":
            given |= {"model parallel": model_parallel(part, devices), "one device": one_device(part)}
        given = {name: replace(one, micro_batches=number) for name, one in given.items()}
        return Core(
            graph, cluster, cost, given.values(), roles, seed, 1 << 16, copies or 0.0, number, len(every)
        ), given

    cores = [core_of(least)]
    if copies is None or cores[0][0].most_held <= min(room):
        every, more = (), []
    cores += map(core_of, more)
    ways = [Way(core, given, recomputed) for core, given in cores for recomputed in dict.fromkeys([(), every])]
    overfull = OVERFULL * max(max(way.costs().values()) for way in ways)
    if copies is not None:
        for core, _ in cores:
            core.hold_in_memory(room, overfull)
    log = Log(min(way.costs().values()) for way in ways)
    with tqdm(total=budget, desc="search", unit="s", disable=not progress, bar_format=BAR) as log.bar:
        way, best, explored = _explore(ways, METHODS[method], budget * 2 / 3, temperature, every, log)
        core, costs = way.core, way.costs()
        core.begin(best)
        tried, optimum = settle(core, every, inf if finish else budget - log.passed, log)
    if copies is not None:
        _check_memory(graph, cluster, core.strategy, copies, explored + tried)
    trace = tuple(one for one in log.trace if copies is None or one[1] < overfull)
    return Found(core.strategy, core.seconds, optimum, explored + tried, trace, tuple(costs.items()))


@dataclass(frozen=True)
class Way:
    """A number of micro-batches, which is the core's, what is recomputed at first, and strategies to start from."""

    core: Core
    given: Mapping[str, Strategy]
    recomputed: Groups

    @property
    def starts(self) -> dict[str, Strategy]:
        return {name: replace(one, recomputed=self.recomputed) for name, one in self.given.items()}

    def costs(self) -> dict[str, float]:
        """The seconds of the starts."""
        return {name: self.core.begin(start) for name, start in self.starts.items()}


Explore = Callable[[Core, Mapping[str, Strategy], Mapping[str, float], float, float, "Log"], tuple[Strategy, int]]


def _explore(
    ways: Sequence[Way], method: Explore, budget: float, hot: float, every: Groups, log: Log
) -> tuple[Way, Strategy, int]:
    """All ways in half of the time, and the best one in the other half; a single way in all of it. A way that cannot be
    faster than what is known is left out. Returns the best way and strategy, and how many were tried."""
    if len(ways) == 1:
        return ways[0], *method(ways[0].core, ways[0].starts, ways[0].costs(), budget, hot, log)
    found: list[tuple[float, Way, Strategy]] = []
    tried, end = 0, log.passed + budget / 2
    for at, way in enumerate(ways):
        costs = way.costs()
        if found and way.core.least_seconds >= min(one[0] for one in found):
            continue
        share = max(budget / 1000, (end - log.passed) / (len(ways) - at))
        fits = min(costs.values()) < way.core.problem.overfull[0]
        best, more = method(way.core, way.starts, costs, share, hot if fits else OVERFULL_TEMPERATURE, log)
        way.core.begin(best)
        tried += more + flip(way.core, every, log)[0]
        found.append((way.core.seconds, way, way.core.strategy))
    seconds, way, best = min(found, key=lambda one: one[0])
    way.core.begin(best)
    again, more = method(way.core, {"best": best}, {"best": seconds}, budget / 2, hot, log)
    return way, again, tried + more


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
            "for each byte of parameters; use more devices or micro-batches, or a smaller batch, parameter_copies or "
            "dtype"
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
        steps = _next_steps(steps, monotonic() - began, budget)
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
            steps = _next_steps(steps, monotonic() - now, each)
            log(core.best[1], f"from {name}, {tried:,} tried")
        ends.append(core.best)
    return min(ends, key=lambda end: end[1])[0], tried


METHODS = {"leaps": _leaps, "mcmc": _mcmc}


def _next_steps(steps: int, took: float, budget: float) -> int:
    """How many steps to take until the next look at the clock, in a search of `budget` seconds."""
    return max(1, min(int(steps * min(SLICE, budget / 4) / max(took, 1e-6)), 8 * steps))


def settle(core: Core, every: Groups, budget: float, log: Log) -> tuple[int, bool]:
    """`polish` and `flip` in turn, until neither is an improvement, or `budget` seconds have passed. Returns how many
    strategies were tried, and whether the last one is a local optimum."""
    end, tried = monotonic() + budget, 0
    while True:
        more, optimum = polish(core, end - monotonic(), log)
        tried += more
        if not optimum:
            return tried, False
        more, changed = flip(core, every, log)
        tried += more
        if not changed:
            return tried, True


def flip(core: Core, every: Groups, log: Callable[[float, str], None]) -> tuple[int, bool]:
    """Recompute single groups of these, or no longer, or one in place of another, as long as that makes the step
    faster. Returns how many strategies were tried, and whether any was faster."""
    best, seconds, now = core.strategy, core.seconds, set(core.strategy.recomputed)
    tried, better, changed = 0, True, False
    while better:
        better = False
        for turned in chain(combinations(every, 1), combinations(every, 2)):
            if len(turned) == 2 and len(now.intersection(turned)) != 1:
                continue
            tried += 1
            again = now ^ set(turned)
            recomputed = tuple(group for group in every if group in again)
            if core.begin(replace(best, recomputed=recomputed)) < seconds:
                best, seconds, now, better, changed = core.strategy, core.seconds, again, True, True
                log(seconds, f"{len(now)} of {len(every)} groups are recomputed")
    core.begin(best)
    return tried, changed


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
