"""The compiled core as a Python object with one strategy in it. Its arrays grow when messages need room."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph, micro_batch
from fxpipe.ir.operators.strategy import Config, Strategy, check, cut
from fxpipe.planning.operators.compiled.block_moves import explore, leap
from fxpipe.planning.operators.compiled.flat_arrays import RANK, Ints, problem, state
from fxpipe.planning.operators.compiled.metropolis import begin, improve

from .compiled.cut_patterns import patterns
from .compiled.recompute_arrays import RecomputeArrays
from .operator_costs import Cost
from .strategy_space import fixed


class Core:
    """A strategy of one graph on one cluster, to be changed and simulated. `random` is the state of the random numbers,
    `best` the best strategy of the chain. `capacity` is the room for messages to begin with, `copies` how many bytes
    are in memory for each byte of weights. All strategies have this many `micro_batches`, and recompute at most as many
    `groups` of operators; a change keeps what is recomputed."""

    def __init__(
        self,
        graph: OperatorGraph,
        cluster: Cluster,
        cost: Cost,
        starts: Iterable[Strategy] = (),
        roles: str = "SAP",
        seed: int = 0,
        capacity: int = 1 << 16,
        copies: float = 0.0,
        micro_batches: int = 1,
        groups: int = 1,
    ) -> None:
        self.whole, self.micro_batches, self.groups = graph, micro_batches, groups
        self.graph, self.devices = micro_batch(graph, micro_batches), len(cluster.devices)
        self.placed = tuple(at for at, operator in enumerate(graph) if operator.kind != "input")
        self.problem = problem(self.graph, cluster, cost, tuple(starts), roles, copies, micro_batches)
        self.again = RecomputeArrays(self.graph, self.placed, self.problem)
        self.state = state(self.problem, capacity, groups)
        self.random: Ints = np.array([(seed * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 63) or 1], np.int64)
        self._devices = np.zeros(self.problem.parts, np.int64)
        self._patterns = patterns(self.problem, [graph.operators[at] for at in self.placed])
        self._leap = leap(self.problem)
        n, parts = self.problem.n, self.problem.parts
        self.best_arrays = np.array([np.inf]), np.zeros(n, np.int64), np.zeros((n, parts), np.int64)

    def hold_in_memory(self, room: Iterable[float], overfull: float) -> None:
        """From now on, count `overfull` seconds and more for a strategy that needs more than `room` bytes on a device.
        Until the next `begin`, the current strategy is as it was."""
        self.problem.room[:] = list(room)
        self.problem.overfull[0] = overfull

    @property
    def held(self) -> list[float]:
        """Bytes that the current strategy needs on each device."""
        after = self.state.since[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]  # by group, of operators after it
        more = (self.state.again[:, :-1] - after).max(axis=1, initial=0.0)
        return [float(size) for size in self.state.device["held"] + more]

    @property
    def most_held(self) -> float:
        """Bytes that no strategy exceeds on a device, if nothing is recomputed."""
        self.again.set(())
        p = self.problem
        parts = [p.kept[first : first + count].sum() for first, count in zip(p.seconds_first, p.row_parts, strict=True)]
        operators = [max(parts[p.row_first[i] : p.row_first[i + 1]]) for i in range(p.n)]
        return float(sum(operators) + p.shares * p.held_bytes.sum())

    @property
    def least_seconds(self) -> float:
        """Seconds that no strategy undercuts, whatever it recomputes: all computations, shared evenly."""
        p = self.problem
        each = (p.seconds[:, :, 0] + self.again.backward).min(axis=0)
        parts = [each[first : first + count].sum() for first, count in zip(p.seconds_first, p.row_parts, strict=True)]
        operators = [min(parts[p.row_first[i] : p.row_first[i + 1]]) for i in range(p.n)]
        return float(sum(operators)) * self.micro_batches / self.devices

    @property
    def seconds(self) -> float:
        """Seconds of a step with the current strategy; with those that count for it if it does not fit in memory."""
        return float(self.state.cost[0])

    @property
    def strategy(self) -> Strategy:
        """The current strategy."""
        p = self.problem
        places = self.state.task["place"][: 2 * p.n * p.parts].reshape(2 * p.n, p.parts)[::2]
        return self._strategy(self.state.row, places)

    @property
    def best(self) -> tuple[Strategy, float]:
        """The best strategy of the chain since `begin`, and its seconds."""
        seconds, rows, places = self.best_arrays
        return self._strategy(rows, places), float(seconds[0])

    def begin(self, strategy: Strategy) -> float:
        """Make a strategy the current and the best one; returns the seconds of its step."""
        rows, places = self.arrays(strategy)
        self.again.set(strategy.recomputed)
        while not begin(self.problem, self.state, rows, places):
            self.state = state(self.problem, 2 * len(self.state.message), self.groups)
        for best, now in zip(self.best_arrays, (self.seconds, rows, places), strict=True):
            best[:] = now
        return self.seconds

    def explore(self, steps: int, temperature: float, share: float = 0.0) -> list[tuple[int, float]]:
        """Go `steps` steps of the chain; `temperature` is in seconds. A `share` of the steps are leaps: changes of many
        operators at once. Returns (step, seconds) of each improvement."""
        found: list[tuple[int, float]] = []
        trace, done = np.zeros((steps + 1, 2)), 0
        while done < steps:
            taken = explore(
                *(self.problem, self._patterns, self.state, self._leap, self.random, steps - done, temperature, share),
                *(*self.best_arrays, trace, self._devices),
            )
            found += [(done + int(at), float(cost)) for at, cost in trace[1 : int(trace[0, 0]) + 1]]
            done += taken
            if done < steps:
                self.grow()
        return found

    def improve(self, i: int) -> bool:
        """Give number i of the placed operators its best config, the others unchanged. False if it had it already."""
        while (found := improve(self.problem, self.state, i, self._devices)) < 0:
            self.grow()
        return found > 0

    def grow(self) -> None:
        """Make room for twice as many messages."""
        larger = state(self.problem, 2 * len(self.state.message), self.groups)
        for name, array in self.state._asdict().items():
            getattr(larger, name)[: len(array)] = array
        self.state = larger

    def arrays(self, strategy: Strategy) -> tuple[Ints, Ints]:
        """The row and the devices of each operator that is placed. Raises ValueError if the strategy does not fit."""
        check(self.whole, strategy, self.devices)
        if strategy.micro_batches != self.micro_batches:
            raise ValueError(f"a strategy of {strategy.micro_batches} micro-batches is not one of {self.micro_batches}")
        if len(strategy.recomputed) > self.groups:
            raise ValueError(f"{len(strategy.recomputed)} groups are recomputed; there is room for {self.groups}")
        p = self.problem
        rows, places = np.zeros(p.n, np.int64), np.zeros((p.n, p.parts), np.int64)
        for i, at in enumerate(self.placed):
            config = strategy.configs[at]
            degrees = (*config.degrees, *[1] * (RANK - len(config.degrees)), config.holders)
            own = range(p.row_first[i], p.row_first[i + 1])
            row = next((row for row in own if tuple(p.degrees[row]) == degrees), None)
            if row is None:
                operator = self.graph.operators[at]
                raise ValueError(f"{operator.name!r} cut {cut(operator, config)} is not in the space")
            rows[i], places[i, : config.parts] = row, config.devices
        return rows, places

    def _strategy(self, rows: Ints, places: Ints) -> Strategy:
        p, configs = self.problem, [fixed(operator) for operator in self.graph]
        for i, at in enumerate(self.placed):
            degrees = tuple(map(int, p.degrees[rows[i], : len(configs[at].degrees)]))
            devices = tuple(map(int, places[i, : p.row_parts[rows[i]]]))
            configs[at] = Config(degrees, devices, int(p.degrees[rows[i], RANK]))
        return Strategy(tuple(configs), self.micro_batches, self.again.groups or ())
