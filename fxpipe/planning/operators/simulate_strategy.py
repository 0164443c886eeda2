"""The time and timeline of a strategy: the SOAP paper's algorithm 1, in plain Python. Each device and each link does
its tasks in the order in which they become ready, ties by their keys.

Micro-batches run one after the other, each as the last one does until its computations have ended; then it exchanges
the gradients of weights.

`search` uses the compiled core, which gives the same times a thousand times as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.ir.timeline import Span, Timeline

from .message_links import links
from .operator_costs import Cost
from .task_graph import Key, Task, followers, tasks

SPANS = {"F": "F", "B": "B", "T": "T", "S": "A"}


@dataclass(frozen=True)
class Times:
    """When a task could begin, did begin, and ended, in seconds."""

    ready: float
    start: float
    end: float


def run(todo: Sequence[Task]) -> dict[Key, Times]:
    """The times of all tasks."""
    next_of = followers(todo)
    waiting = {task.key: len(task.after) for task in todo}
    ready = dict.fromkeys(waiting, 0.0)
    queue = [(0.0, task.key, task) for task in todo if not task.after]
    heapify(queue)
    free: dict[int, float] = {}
    times: dict[Key, Times] = {}
    while queue:
        at, key, task = heappop(queue)
        start = max(at, free.get(task.device, 0.0)) if task.device >= 0 else at
        end = start + task.seconds
        free[task.device] = end
        times[key] = Times(at, start, end)
        for one in next_of.get(key, ()):
            ready[one.key] = max(ready[one.key], end)
            waiting[one.key] -= 1
            if not waiting[one.key]:
                heappush(queue, (ready[one.key], one.key, one))
    return times


def makespan(times: Mapping[Key, Times]) -> float:
    """Seconds until the last task has ended."""
    return max((one.end for one in times.values()), default=0.0)


def computed(times: Mapping[Key, Times]) -> float:
    """Seconds until the last task has ended that is not for the exchange of weights' gradients."""
    return max((one.end for key, one in times.items() if key[0] < 2), default=0.0)


def simulate(graph: OperatorGraph, cluster: Cluster, strategy: Strategy, cost: Cost) -> float:
    """Seconds that a training step takes. Raises ValueError if the strategy does not fit the graph or cluster."""
    times = run(tasks(graph, cluster, strategy, cost))
    return makespan(times) + (strategy.micro_batches - 1) * computed(times)


def timeline(graph: OperatorGraph, cluster: Cluster, strategy: Strategy, cost: Cost, name: str = "step") -> Timeline:
    """What each device and each link does when. A span's stage is the number of its operator or group of weights."""
    todo = tasks(graph, cluster, strategy, cost)
    labels, wires = cluster.labels, links(cluster).names
    times, places, last = run(todo), (*labels, *wires), len(graph) - 1
    repeated = [task for task in todo if task.key[0] < 2]
    spans = [
        span
        for i in range(strategy.micro_batches)
        for span in _spans(repeated if i < strategy.micro_batches - 1 else todo, times, places, last, i)
    ]
    return Timeline(name, labels, tuple(spans), wires)


def _spans(
    todo: Iterable[Task], times: Mapping[Key, Times], places: Sequence[str], last: int, i: int
) -> Iterable[Span]:
    """The spans of micro-batch i."""
    began = i * computed(times)
    for task in todo:
        if task.device >= 0:
            stage = last - task.key[1] if task.key[0] == 1 else task.key[1]
            when = times[task.key]
            place, kind = places[task.device], SPANS[task.kind]
            yield Span(place, began + when.start, began + when.end, kind, stage, i, task.label)
