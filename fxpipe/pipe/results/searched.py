"""What `fxpipe.search` returns: the strategy with its graph and cluster, so that it can be simulated, drawn and saved
as one JSON file.

    {"graph": {"name": "NMT", ...}, "cluster": {"devices": ...}, "strategy": {"embed.0": {"degrees": ...}, ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from tabulate import tabulate

from fxpipe.errors import PlanError
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.drawable import Drawable
from fxpipe.ir.operators import operators, strategy
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.ir.timeline import Timeline
from fxpipe.ir.units import count, show_bytes, show_seconds
from fxpipe.planning.operators.expert_strategies import data_parallel
from fxpipe.planning.operators.operator_costs import Cost, estimated, once
from fxpipe.planning.operators.simulate_strategy import timeline
from fxpipe.planning.operators.strategy_memory import held
from fxpipe.planning.operators.task_graph import tasks
from fxpipe.viz import strategy_picture
from fxpipe.viz.picture_file import Picture

from .strategy_table import table


@dataclass(frozen=True)
class Searched(Drawable):
    """What `fxpipe.search` returns, for `fxpipe.compile(model, plan=...)`: a `strategy` (how each operator is cut,
    and which device computes each part) for the operators `graph` on `cluster`, with times estimated from FLOPs and
    bytes. Print with `str`.

    - `trace`: the progress of the search, as pairs: seconds of searching, and seconds of the best step found by then.
    - `tried`: how many strategies were tried.
    - `copies`: the `parameter_copies` that were given.
    """

    graph: OperatorGraph
    cluster: Cluster
    strategy: Strategy
    trace: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    tried: int = field(default=0, compare=False)
    copies: float = 4

    def __str__(self) -> str:
        """Step time, computation, traffic and memory of the strategy and of data parallelism, and how each operator is
        cut."""
        parts = [
            f"{self.graph.name}: {facts(self)}",
            beside(self),
            table(zip(self.graph, self.strategy.configs, strict=True), self.strategy.group_of),
        ]
        return "\n\n".join([*parts, history(self)] if self.trace else parts)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    @cached_property
    def cost(self) -> Cost:
        """The function that estimates seconds, (forward, backward), from a part of an operator and a device."""
        return once(estimated())

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, of every device and every link."""
        return timeline(self.graph, self.cluster, self.strategy, self.cost, self.graph.name)

    @cached_property
    def seconds(self) -> float:
        """The simulated time of a step, in seconds."""
        if "timeline" not in self.__dict__:
            try:
                from fxpipe.planning.operators.compiled_core import Core
            except ImportError:
                return self.timeline.makespan
            number, groups = self.strategy.micro_batches, len(self.strategy.recomputed)
            core = Core(
                self.graph, self.cluster, self.cost, (self.strategy,), "", micro_batches=number, groups=max(1, groups)
            )
            return core.begin(self.strategy)
        return self.timeline.makespan

    @cached_property
    def transferred(self) -> float:
        """Bytes that are sent over links in a step: values and gradients of each micro-batch, and once those of
        weights."""
        todo = tasks(self.graph, self.cluster, self.strategy, self.cost)
        return sum(task.size * (self.strategy.micro_batches if task.key[0] < 2 else 1) for task in todo)

    @property
    def memory(self) -> dict[str, float]:
        """Bytes in use on each device, by label: parameters, gradients, optimizer state and activations."""
        sizes = held(self.graph, self.strategy, len(self.cluster.devices), self.copies)
        return dict(zip(self.cluster.labels, sizes, strict=True))

    @property
    def fits(self) -> bool:
        """Whether the strategy fits in the memory of all devices."""
        return all(size <= self.cluster.device(label).memory for label, size in self.memory.items())

    @cached_property
    def data_parallel(self) -> Searched:
        """Every operator cut by sample over all devices, for comparison."""
        return Searched(
            self.graph, self.cluster, data_parallel(self.graph, len(self.cluster.devices)), copies=self.copies
        )

    def _picture(self) -> Picture:
        """The strategy: a box for each operator, in the colours of its devices."""

        def svg() -> str:
            return strategy_picture.draw(self.graph, self.strategy, self.cluster, facts(self))

        return Picture(self.graph.name, svg, partial(str, self))

    def dump(self) -> str:
        """Operators, cluster and strategy as JSON text. `fxpipe.compile(model, plan=path)` runs a file of it;
        `fxpipe.pipe.results.searched.load(path)` reads it back."""
        return write(
            StrategyFile(
                self.graph,
                self.cluster,
                strategy.by_name(self.graph, self.strategy),
                self.copies,
                self.strategy.micro_batches,
                self.strategy.recomputed,
            ),
            3,
        )


def facts(found: Searched) -> str:
    """A line: the time of a step, the speed-up over data parallelism, micro-batches, and what is recomputed."""
    times = found.data_parallel.seconds / found.seconds if found.seconds else 1.0
    devices, number = count(len(found.cluster.devices), "device", "devices"), found.strategy.micro_batches
    again, placed = len(found.strategy.group_of), sum(operator.kind != "input" for operator in found.graph)
    return (
        f"{show_seconds(found.seconds)} a step on {devices}, {times:.2f} times as fast as data parallel"
        + (f"; {number} micro-batches" if number > 1 else "")
        + (f"; {again} of {count(placed, 'operator', 'operators')} recomputed" if again else "")
    )


def history(found: Searched) -> str:
    """A line: how many strategies were tried, and the best step at up to four moments of the search."""
    chosen = sorted({round(at * (len(found.trace) - 1) / 3) for at in range(4)})
    moments = [f"{show_seconds(best)} after {show_seconds(at)}" for at, best in (found.trace[i] for i in chosen)]
    return f"{found.tried:,} strategies tried; {', '.join(moments)}"


def beside(found: Searched) -> str:
    """Time, computation (all devices together), bytes sent and most memory of a device, of the strategy and of data
    parallelism."""
    rows = [
        (
            name,
            show_seconds(one.seconds),
            show_seconds(sum(one.timeline.busy)),
            show_bytes(int(one.transferred)),
            show_bytes(max(one.memory.values())) + ("" if one.fits else ", too much"),
        )
        for name, one in (("this strategy", found), ("data parallel", found.data_parallel))
    ]
    return tabulate(rows, ("", "step", "computation", "transferred", "memory"), tablefmt="plain", disable_numparse=True)


@dataclass(frozen=True)
class StrategyFile:
    """The contents of the JSON file; `strategy` has the config of each operator by its name, `recomputed` the groups of
    operators that are computed again in backward."""

    graph: OperatorGraph
    cluster: Cluster
    strategy: Mapping[str, Config]
    copies: float = 4
    micro_batches: int = 1
    recomputed: tuple[tuple[str, ...], ...] = ()


def parse(text: str) -> Searched:
    """The strategy in text that `Searched.dump` wrote. Raises ValueError for other text."""
    file = read(StrategyFile, text)
    operators.check(file.graph)
    clusters.check(file.cluster)
    devices = len(file.cluster.devices)
    configs = strategy.of_names(file.graph, file.strategy, devices, file.micro_batches, file.recomputed)
    return Searched(file.graph, file.cluster, configs, copies=file.copies)


def load(path: str | Path) -> Searched:
    """The strategy in a file. Raises PlanError if there is none."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"no strategy to look at in {str(path)!r}: {error}") from None
