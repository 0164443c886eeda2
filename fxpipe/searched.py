"""What `fxpipe.search` returns: the strategy, with all that it was found for, so that it can be simulated, drawn and
kept as one JSON file.

    {"graph": {"name": "NMT", ...}, "cluster": {"devices": ...}, "strategy": {"embed.0": {"degrees": ...}, ...}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .cuts import table
from .errors import PlanError
from .ir import cluster as clusters
from .ir import operators, strategy
from .ir.cluster import Cluster
from .ir.operators import OperatorGraph
from .ir.strategy import Strategy
from .ir.timeline import Timeline
from .ir.units import show_bytes, show_seconds
from .soap.costs import Cost, once, roofline
from .soap.simulate import timeline
from .soap.strategies import data_parallel
from .soap.tasks import tasks
from .viz import strategy as picture
from .viz import svg


@dataclass(frozen=True)
class Searched:
    """A `strategy` of a `graph` on a `cluster`; its times are estimated from FLOPs and bytes. `trace` tells after how
    many seconds of searching the best step known took how long, and `tried` how many strategies were. Print with
    `str`."""

    graph: OperatorGraph
    cluster: Cluster
    strategy: Strategy
    trace: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    tried: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return show(self)

    @cached_property
    def cost(self) -> Cost:
        """How long parts of operators take."""
        return once(roofline())

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, of every device and every link."""
        return timeline(self.graph, self.cluster, self.strategy, self.cost, self.graph.name)

    @cached_property
    def seconds(self) -> float:
        """What a step takes, as simulated: by the compiled core where numba is there, or else in plain Python."""
        if "timeline" not in self.__dict__:
            try:
                from .soap.core import Core
            except ImportError:
                return self.timeline.makespan
            return Core(self.graph, self.cluster, self.cost, (self.strategy,), roles="").begin(self.strategy)
        return self.timeline.makespan

    @cached_property
    def transferred(self) -> float:
        """Bytes that are sent over links in a step."""
        return sum(task.size for task in tasks(self.graph, self.cluster, self.strategy, self.cost))

    @cached_property
    def data_parallel(self) -> Searched:
        """Every operator cut by sample over all devices, for comparison."""
        return Searched(self.graph, self.cluster, data_parallel(self.graph, len(self.cluster.devices)))

    def picture(self) -> str:
        """The strategy as the text of an SVG file: a box for each operator, in the colours of its devices."""
        return picture.draw(self.graph, self.strategy, self.cluster, self.graph.name, facts(self))

    def svg(self) -> str:
        """The timeline as the text of an SVG file."""
        return svg.draw(self.timeline, self.graph.name)

    def dump(self) -> str:
        """All of it as JSON text; `parse` reads it back."""
        return dump(self)


def facts(found: Searched) -> str:
    """What the strategy is worth, in a line."""
    times = found.data_parallel.seconds / found.seconds if found.seconds else 1.0
    devices = len(found.cluster.devices)
    return f"{show_seconds(found.seconds)} a step on {devices} devices, {times:.2f} times as fast as data parallel"


def history(found: Searched) -> str:
    """How the search went: the best step known at four moments, and how many strategies were tried."""
    chosen = sorted({round(at * (len(found.trace) - 1) / 3) for at in range(4)})
    moments = [f"{show_seconds(best)} after {show_seconds(at)}" for at, best in (found.trace[i] for i in chosen)]
    return f"{found.tried:,} strategies tried; {', '.join(moments)}"


def show(found: Searched) -> str:
    """The facts, the strategy beside data parallelism, and how each operator is cut."""
    parts = [
        f"{found.graph.name}: {facts(found)}",
        beside(found),
        table(zip(found.graph, found.strategy.configs, strict=True)),
    ]
    return "\n\n".join([*parts, history(found)] if found.trace else parts)


def beside(found: Searched) -> str:
    """Time, computation (all devices together) and bytes sent, of the strategy and of data parallelism."""
    rows = [
        (name, show_seconds(one.seconds), show_seconds(sum(one.timeline.busy)), show_bytes(int(one.transferred)))
        for name, one in (("this strategy", found), ("data parallel", found.data_parallel))
    ]
    return tabulate(rows, ("", "step", "computation", "transferred"), tablefmt="plain", disable_numparse=True)


def dump(found: Searched) -> str:
    """All of it as JSON text; `parse` reads it back."""
    graph, cluster = operators.dump(found.graph).strip(), clusters.dump(found.cluster).strip()
    configs = strategy.dump(found.graph, found.strategy).strip()
    return f'{{"graph": {graph},\n"cluster": {cluster},\n"strategy": {configs}}}\n'


def parse(text: str) -> Searched:
    """What `dump` wrote. Raises ValueError for text that is not that."""
    try:
        data: dict[str, Any] = json.loads(text)
        graph, cluster, configs = (json.dumps(data[key]) for key in ("graph", "cluster", "strategy"))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a strategy with its graph and cluster: {error!r}") from None
    where, what = clusters.load(cluster), operators.load(graph)
    return Searched(what, where, strategy.load(what, configs, len(where.devices)))


def load(path: str | Path) -> Searched:
    """The strategy in a file. Raises PlanError where there is none."""
    try:
        return parse(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"no strategy to look at in {str(path)!r}: {error}") from None
