"""The compiled core with a strategy in it: what Python holds while it searches. It grows when messages need room."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, check
from fxpipe.planning.operators.compiled.block_moves import explore, leap
from fxpipe.planning.operators.compiled.exhaustive_search import exhaust
from fxpipe.planning.operators.compiled.flat_arrays import RANK, Floats, Ints, problem, state
from fxpipe.planning.operators.compiled.metropolis import begin, differences, improve, walk, walk_from_nothing
from fxpipe.planning.operators.compiled.path_bound import choices

from .cut_patterns import patterns
from .operator_costs import Cost
from .strategy_space import fixed

MOST_PARTS = 6  # the bounds of exhaustive search are about sets of parts


class Core:
    """Strategies of one graph on one cluster. `random` is the state of its random numbers, `best` the best strategy
    that a walk came by."""

    def __init__(
        self,
        graph: OperatorGraph,
        cluster: Cluster,
        cost: Cost,
        starts: Iterable[Strategy] = (),
        roles: str = "SAP",
        seed: int = 0,
        capacity: int = 1 << 16,
    ) -> None:
        self.graph, self.devices = graph, len(cluster.devices)
        self.placed = tuple(at for at, operator in enumerate(graph) if operator.kind != "input")
        self.problem = problem(graph, cluster, cost, tuple(starts), roles)
        self.state = state(self.problem, capacity)
        self._work, self._times = state(self.problem, 0), np.zeros((0, 3))
        self.random: Ints = np.array([(seed * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 63) or 1], np.int64)
        self._devices = np.zeros(self.problem.parts, np.int64)
        self._patterns = patterns(self.problem, [graph.operators[at] for at in self.placed])
        self._leap = leap(self.problem)
        self._forget()

    def _forget(self) -> None:
        self._best_seconds = np.array([np.inf])
        self._best_row = np.zeros(self.problem.n, np.int64)
        self._best_place = np.zeros((self.problem.n, self.problem.parts), np.int64)

    @property
    def seconds(self) -> float:
        """The seconds of the strategy that it is at."""
        return float(self.state.cost[0])

    @property
    def computation(self) -> float:
        """The seconds of computation of the strategy that it is at, of all devices together."""
        return float(self.state.device["load"].sum())

    @property
    def strategy(self) -> Strategy:
        """The strategy that it is at."""
        p = self.problem
        return self._strategy(self.state.row, self.state.task["place"][: p.n * p.parts].reshape(p.n, p.parts))

    @property
    def best(self) -> tuple[Strategy, float]:
        """The best strategy of all walks since `begin`, and its seconds."""
        return self._strategy(self._best_row, self._best_place), float(self._best_seconds[0])

    def begin(self, strategy: Strategy) -> float:
        """Go to a strategy, simulated from nothing; returns its seconds."""
        rows, places = self._arrays(strategy)
        while not begin(self.problem, self.state, rows, places):
            self.state = state(self.problem, 2 * len(self.state.message))
        self._best_seconds[0] = self.seconds
        self._best_row[:], self._best_place[:] = rows, places
        return self.seconds

    def walk(self, steps: int, temperature: float) -> list[tuple[int, float]]:
        """Go `steps` steps of the chain; `temperature` is in seconds. Returns (step, seconds) of each improvement."""
        best = self._best_seconds, self._best_row, self._best_place

        def go(left: int, trace: Floats) -> int:
            found: int = walk(self.problem, self.state, self.random, left, temperature, *best, trace, self._devices)
            return found

        return self._steps(steps, go)

    def explore(self, steps: int, temperature: float, share: float) -> list[tuple[int, float]]:
        """As `walk`, where a `share` of the steps are leaps: changes of many operators at once."""
        best = self._best_seconds, self._best_row, self._best_place

        def go(left: int, trace: Floats) -> int:
            found: int = explore(
                *(self.problem, self._patterns, self.state, self._leap, self.random, left, temperature, share),
                *(*best, trace, self._devices),
            )
            return found

        return self._steps(steps, go)

    def _steps(self, steps: int, go: Callable[[int, Floats], int]) -> list[tuple[int, float]]:
        """Go on, with more room each time there was not enough, until all steps are taken."""
        found: list[tuple[int, float]] = []
        trace, done = np.zeros((steps + 1, 2)), 0
        while done < steps:
            taken = go(steps - done, trace)
            found += [(done + int(at), float(cost)) for at, cost in trace[1 : int(trace[0, 0]) + 1]]
            done += taken
            if done < steps:
                self._grow()
        return found

    def improve(self, i: int) -> bool:
        """Give the operator number i of those placed its best config, all others as they are. False if it had it."""
        while (found := improve(self.problem, self.state, i, self._devices)) < 0:
            self._grow()
        return found > 0

    def exhaust(self, anywhere: bool = False) -> int:
        """Find the best of all strategies: `best`, which stays what it is where none is faster. With `anywhere`, parts
        may be on any devices, not on runs of neighbours alone. Returns the number of strategies simulated."""
        p = self.problem
        if p.parts > MOST_PARTS:
            raise ValueError(f"all strategies are searched for up to {MOST_PARTS} parts; here operators have {p.parts}")
        best = self._best_seconds, self._best_row, self._best_place
        while (found := exhaust(p, choices(p, anywhere), self.state, state(p, p.parts**2), *best)) < 0:
            self._grow()
        return found

    def differences(self) -> int:
        """How many times of tasks are not those of a simulation from nothing (algorithm 1): 0 if all is well."""
        self._make_room_for_times()
        rows, places = self.state.row, self.state.task["place"][: self.problem.n * self.problem.parts]
        placed = np.ascontiguousarray(places, np.int64).reshape(self._best_place.shape)
        return int(differences(self.problem, self.state, self._work, rows, placed, self._times))

    def walk_from_nothing(self, steps: int, temperature: float) -> None:
        """The chain of `walk` with algorithm 1 for each proposal, to be compared with it. Needs room from the start."""
        rows, places = self._arrays(self.strategy)
        self._make_room_for_times()
        chain = rows, places, np.array([self.seconds]), self._times, self._devices
        if walk_from_nothing(self.problem, self.state, self.random, steps, temperature, *chain) < 0:
            raise ValueError(f"{len(self.state.message)} messages are too few; make the core with more")
        begin(self.problem, self.state, rows, places)

    def _make_room_for_times(self) -> None:
        """A second state of the same size, and a line for each of its tasks: what algorithm 1 works in."""
        if len(self._work.message) != len(self.state.message):
            p, messages = self.problem, len(self.state.message)
            self._work = state(p, messages)
            self._times = np.zeros((2 * p.n * p.parts + p.groups * (1 + p.devices) + messages, 3))

    def _grow(self) -> None:
        larger = state(self.problem, 2 * len(self.state.message))
        for name, array in self.state._asdict().items():
            getattr(larger, name)[: len(array)] = array
        self.state = larger

    def _arrays(self, strategy: Strategy) -> tuple[Ints, Ints]:
        check(self.graph, strategy, self.devices)
        p = self.problem
        rows, places = np.zeros(p.n, np.int64), np.zeros((p.n, p.parts), np.int64)
        for i, at in enumerate(self.placed):
            config = strategy.configs[at]
            degrees = (*config.degrees, *[1] * (RANK - len(config.degrees)))
            own = range(p.row_first[i], p.row_first[i + 1])
            row = next((row for row in own if tuple(p.degrees[row]) == degrees), None)
            if row is None:
                raise ValueError(f"{self.graph.operators[at].name!r} cut by {config.degrees} is not in the space")
            rows[i], places[i, : config.parts] = row, config.devices
        return rows, places

    def _strategy(self, rows: Ints, places: Ints) -> Strategy:
        p, configs = self.problem, [fixed(operator) for operator in self.graph]
        for i, at in enumerate(self.placed):
            degrees = tuple(map(int, p.degrees[rows[i], : len(configs[at].degrees)]))
            configs[at] = Config(degrees, tuple(map(int, places[i, : p.row_parts[rows[i]]])))
        return Strategy(tuple(configs))
