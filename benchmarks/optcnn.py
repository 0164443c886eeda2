"""OptCNN's dynamic programme (Jia et al., "Exploring hidden dimensions in parallelizing convolutional neural networks",
2018), in the space and with the costs of this project: what FlexFlow's search is compared with in its figure 10.

It finds the strategy that is least in the sum

    over operators   seconds of computing, forward and backward, and of exchanging gradients
    over edges       seconds of the messages between the two operators, forward and backward

as if nothing happened at the same time but the parts of one operator, and the messages of one edge on different links.
The sum over a graph is made smaller exactly, by two steps until one or two operators are left, or neither applies:

    an operator with one reader and one input     a ─▶ b ─▶ c   becomes   a ─▶ c, the best b for each pair (a, c)
    two edges between the same operators          a ══▶ c       becomes   a ─▶ c, the sum of both

What is left after that is tried in full. Graphs of unrolled recurrent networks leave too much: OptCNN is for
convolutional networks. Each operator is on the first devices: where it is placed is no choice, only how it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, regions
from fxpipe.planning.operators.message_links import Links, links
from fxpipe.planning.operators.operator_costs import Cost, estimated, once, part
from fxpipe.planning.operators.strategy_space import configs
from fxpipe.planning.operators.task_graph import overlaps

Floats = NDArray[np.float64]
MOST = 10**7  # strategies of what is left that are tried in full


def space(graph: OperatorGraph, devices: int) -> list[list[Config]]:
    """The configs of each operator: all ways to cut it, on the first devices."""
    return [[one for one in configs(operator, devices) if one.devices[0] == 0] for operator in graph]


def optcnn(graph: OperatorGraph, cluster: Cluster, cost: Cost | None = None) -> tuple[Strategy, float]:
    """The strategy of the least sum, and its sum in seconds. Raises ValueError if too much is left of the graph."""
    task = Sums(graph, cluster, cost or once(estimated()))
    return task.best()


@dataclass
class Sums:
    """The sums to make least: `own[i]` by config of operator i, `between[i, j]` by configs of both."""

    graph: OperatorGraph
    cluster: Cluster
    cost: Cost
    space: list[list[Config]] = field(init=False)
    own: dict[int, Floats] = field(default_factory=dict)
    between: dict[tuple[int, int], Floats] = field(default_factory=dict)
    left_out: list[tuple[int, int, int, NDArray[np.int64]]] = field(default_factory=list)  # b, a, c: b of (a, c)

    def __post_init__(self) -> None:
        graph, wires = self.graph, links(self.cluster)
        self.space = space(graph, len(self.cluster.devices))
        fed = {at for at, operator in enumerate(graph) if operator.kind == "input"}
        for at in range(len(graph)):
            if at not in fed:
                self.own[at] = np.array([computing(self, at, one) + exchange(self, at, one, wires)
                                         for one in self.space[at]])  # fmt: skip
        for a, c, which in graph.edges:
            if a not in fed:
                self.add(a, c, moved(self, a, c, which, wires))

    def add(self, a: int, c: int, seconds: Floats) -> None:
        """One more edge from a to c; edges between the same operators are one."""
        self.between[a, c] = self.between[a, c] + seconds if (a, c) in self.between else seconds

    def best(self) -> tuple[Strategy, float]:
        while (found := self._in_line()) is not None:
            self._leave_out(*found)
        chosen, seconds = self._in_full()
        for b, a, c, choice in reversed(self.left_out):
            chosen[b] = int(choice[chosen[a], chosen[c]])
        picked = (own[chosen.get(at, 0)] for at, own in enumerate(self.space))
        return Strategy(tuple(picked)), seconds

    def _in_line(self) -> tuple[int, int, int] | None:
        """An operator with one input and one reader, with both."""
        for b in self.own:
            into = [a for a, c in self.between if c == b]
            out = [c for a, c in self.between if a == b]
            if len(into) == len(out) == 1:
                return b, into[0], out[0]
        return None

    def _leave_out(self, b: int, a: int, c: int) -> None:
        before, after = self.between.pop((a, b)), self.between.pop((b, c))
        every = before[:, :, None] + self.own.pop(b)[None, :, None] + after[None, :, :]
        self.left_out.append((b, a, c, every.argmin(axis=1)))
        self.add(a, c, every.min(axis=1))

    def _in_full(self) -> tuple[dict[int, int], float]:
        """The best of all strategies of what is left."""
        left = list(self.own)
        shape = [len(self.space[at]) for at in left]
        if np.prod(shape, dtype=float) > MOST:
            raise ValueError(f"{len(left)} operators of {self.graph.name} are left, with too many strategies to try")
        total = np.zeros(shape)
        for at, seconds in self.own.items():
            total += seconds.reshape([-1 if one == at else 1 for one in left])
        for (a, c), both in self.between.items():
            total += both.reshape([len(self.space[one]) if one in (a, c) else 1 for one in left])
        where = np.unravel_index(int(total.argmin()), shape)
        return {at: int(choice) for at, choice in zip(left, where, strict=True)}, float(total.min())


def computing(task: Sums, at: int, config: Config) -> float:
    """The slowest part, forward and backward."""
    operator = task.graph.operators[at]
    placed = zip(regions(operator, config), config.devices, strict=True)
    return max(
        sum(task.cost(part(task.graph, operator, region), task.cluster.devices[device])) for region, device in placed
    )


def exchange(task: Sums, at: int, config: Config, wires: Links) -> float:
    """Passing on the gradients of weights that several devices hold, in a ring."""
    operator = task.graph.operators[at]
    shares = 1
    for role, degree in zip(operator.roles, config.degrees, strict=True):
        shares *= degree if role == "P" else 1
    copies = config.parts // shares
    if copies < 2 or not operator.weights:
        return 0.0
    size = 2 * (copies - 1) / copies * operator.weights * task.graph.element / shares
    ring = zip(config.devices, (*config.devices[1:], config.devices[0]), strict=True)
    return max(wires.seconds(a, b, size) for a, b in ring)


def moved(task: Sums, a: int, c: int, which: int, wires: Links) -> Floats:
    """By configs of both ends of an edge, the seconds of its messages there and back: those of the busiest link."""
    found = np.zeros((len(task.space[a]), len(task.space[c])))
    reader = task.graph.operators[c]
    for x, made in enumerate(task.space[a]):
        for y, taken in enumerate(task.space[c]):
            there: dict[int, float] = {}
            back: dict[int, float] = {}
            for k, m, elements in overlaps(task.graph, reader, which, made, taken):
                sender, receiver = made.devices[k], taken.devices[m]
                if sender != receiver:
                    size = elements * task.graph.element
                    for busy, one, other in ((there, sender, receiver), (back, receiver, sender)):
                        link = wires.number[one][other]
                        busy[link] = busy.get(link, 0.0) + wires.seconds(one, other, size)
            found[x, y] = max(there.values(), default=0.0) + max(back.values(), default=0.0)
    return found
