"""The `strategy` of `fxpipe.compile`: its forms, and how it assigns a device to every op of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Strategy, check
from fxpipe.passes.sharding import shard
from fxpipe.pipe.options.compile_options import Place
from fxpipe.pipe.results.searched import Searched, load
from fxpipe.planning.operators.fit_strategy import fit
from fxpipe.planning.operators.reading.read_operators import read

RequestedCall = Searched | tuple[OperatorGraph, Strategy] | str | Path | Place


@dataclass(frozen=True)
class Sharding:
    """Cuts the ops of a graph and places them on `devices` devices, as the `strategy` for `operators` says."""

    operators: OperatorGraph
    strategy: Strategy
    devices: int

    def __call__(self, graph: Graph, sizes: Mapping[str, int]) -> Placed:
        """Raises PlanError if the strategy does not fit this graph, or an op cannot be cut."""
        reading = read(graph, sizes)
        try:
            fitted = fit(self.operators, self.strategy, reading.operators, self.devices)
        except ValueError as error:
            raise PlanError(str(error)) from None
        placed = shard(graph, reading, fitted, sizes)
        return replace(placed, cuts=tuple(zip(reading.operators, fitted.configs, strict=True)))


def place_of(asked: RequestedCall) -> tuple[Place, int | None]:
    """A function that places ops, and the number of devices it uses; None for the caller's own function. Raises
    PlanError if `asked` is not a valid strategy."""
    if isinstance(asked, (str, Path)):
        asked = load(asked)
    if isinstance(asked, Searched):
        return Sharding(asked.graph, asked.strategy, len(asked.cluster.devices)), len(asked.cluster.devices)
    if isinstance(asked, tuple):
        graph, strategy = asked
        devices = 1 + max(device for config in strategy.configs for device in config.devices)
        try:
            check(graph, strategy, devices)
        except ValueError as error:
            raise PlanError(str(error)) from None
        return Sharding(graph, strategy, devices), devices
    if callable(asked):
        return asked, None
    raise PlanError(
        f"strategy is a {type(asked).__name__}: give what fxpipe.search found, the path of its JSON file, or a pair of "
        "an OperatorGraph and its Strategy"
    )
