"""How long a strategy takes where devices slow each other down, in plain Python.

The SOAP paper's simulator assumes that a task takes the same time whatever else runs (A1). That holds for GPUs with
memory of their own; workers on the cores of one machine share its memory, and what is bound by it takes longer while
others compute. Here a part has two times, by itself and beside computing devices, and what is left of it is done at the
rate of the moment:

    device 0   a ━━━━━━━━━┯━━━━━  slow, then fast    a: 2 s alone, 4 s beside the other; b: 1 s and 2 s
    device 1   b ━━━━━━━━━┛                          b ends at 2 s, with half of a done, which ends at 3 s

And where a device could do several parts, it does them in the order of `fxpipe.compile(model, plan=...)`: forward,
first what another device waits for (`fxpipe.planning.stages.device_segments`); backward, the other way round. The
paper's devices do first what is ready first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.planning.operators.operator_costs import Cost
from fxpipe.planning.operators.simulate_strategy import Times, makespan
from fxpipe.planning.operators.task_graph import Key, Task, followers, tasks

from .copy_cost import handling

Turn = tuple[float, float, Key]
COMPUTE = "FB"  # kinds of tasks that are slowed down, and slow down others


def simulate_shared(graph: OperatorGraph, cluster: Cluster, strategy: Strategy, alone: Cost, beside: Cost) -> float:
    """Seconds that a training step takes: `alone` are the times of parts while no other device computes, `beside`
    while all do. To cut and to join what parts read takes time, too, at the bandwidth of the memory, which is one for
    all devices. Raises ValueError where the strategy does not fit."""
    each = [device.bandwidth for device in cluster.devices]  # while all are busy
    moved, total = handling(graph, strategy), sum(each)
    slowed = {
        task.key: task.seconds + moved.get(task.key, 0.0) / each[task.device]
        for task in tasks(graph, cluster, strategy, beside)
        if task.kind in COMPUTE
    }
    todo = [
        replace(task, seconds=task.seconds + moved.get(task.key, 0.0) / total)
        for task in tasks(graph, cluster, strategy, alone)
    ]
    return makespan(run(todo, slowed, len(cluster.devices), ways(todo)))


def ways(todo: Sequence[Task]) -> dict[Key, float]:
    """For each forward part the seconds that its device computes, from the start of the part on, until another device
    gets something that follows from it; infinite if none does."""
    found, onward = dict[Key, float](), dict[Key, float]()
    for task in sorted(todo, key=lambda task: task.key, reverse=True):
        if task.kind == "F":
            found[task.key] = task.seconds + onward.get(task.key, inf)
        then = 0.0 if task.kind == "T" else found.get(task.key, inf)
        for key in task.after:
            onward[key] = min(onward.get(key, inf), then)
    return found


def run(
    todo: Sequence[Task], slowed: Mapping[Key, float], devices: int, ways: Mapping[Key, float] | None = None
) -> dict[Key, Times]:
    """The times of all tasks, of which the computing ones take `slowed` seconds while all `devices` compute, and in
    proportion while some do. Of what is ready a device does first the part with the shortest of the `ways`, and the
    parts backward in the opposite order; without them, and on links, what was ready first."""
    state = _State(todo, ways)
    for task in todo:
        if not task.after:
            state.offer(task)
    state.start()
    while state.running:
        busy = sum(one.task.kind in COMPUTE for one in state.running.values())
        share = max(busy - 1, 0) / max(devices - 1, 1)
        for one in state.running.values():
            task = one.task
            extra = (slowed[task.key] - task.seconds) * share if task.kind in COMPUTE else 0.0
            one.seconds = task.seconds + extra
        state.advance(min(one.seconds * one.left for one in state.running.values()))
    return state.times


@dataclass
class _Running:
    """A task on its way: the fraction that is `left`, since when, and the `seconds` all of it takes at this rate."""

    task: Task
    start: float
    left: float = 1.0
    seconds: float = 0.0


@dataclass
class _State:
    """The state of the walk: the time that it is `now`, and what runs and waits on each device and link."""

    todo: Sequence[Task]
    ways: Mapping[Key, float] | None
    now: float = 0.0
    running: dict[int, _Running] = field(default_factory=dict)
    queues: dict[int, list[tuple[Turn, Task]]] = field(default_factory=dict)
    times: dict[Key, Times] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = {task.key: len(task.after) for task in self.todo}
        self.next = followers(self.todo)
        self.ready: dict[Key, float] = {}
        self.forward = {task.label: task.key for task in self.todo if task.kind == "F"}

    def offer(self, task: Task) -> None:
        """A task is ready now. What is on no device ends at once."""
        self.ready[task.key] = self.now
        if task.device < 0:
            self.end(task, self.now)
        else:
            heappush(self.queues.setdefault(task.device, []), (self.turn(task), task))

    def turn(self, task: Task) -> Turn:
        """What says which of the tasks that are ready on a device comes first."""
        first = 0.0
        if self.ways is not None and task.kind in COMPUTE:
            first = self.ways[task.key] if task.kind == "F" else -self.times[self.forward[task.label]].start
        return first, self.now, task.key

    def start(self) -> None:
        """Idle devices and links begin their next tasks, those that became ready first before others; what takes no
        time is done at once."""
        while idle := [queue for device, queue in self.queues.items() if queue and device not in self.running]:
            _, task = heappop(min(idle, key=lambda queue: queue[0][0]))
            if task.seconds:
                self.running[task.device] = _Running(task, self.now)
            else:
                self.end(task, self.now)

    def advance(self, seconds: float) -> None:
        """Let time pass until the first of what runs ends, and begin what can."""
        self.now += seconds
        ended = []
        for device, one in self.running.items():
            one.left -= seconds / one.seconds
            if one.left <= 1e-12:
                ended.append(device)
        for device in ended:
            one = self.running.pop(device)
            self.end(one.task, one.start)
        self.start()

    def end(self, task: Task, start: float) -> None:
        self.times[task.key] = Times(self.ready[task.key], start, self.now)
        for one in self.next.get(task.key, ()):
            self.waiting[one.key] -= 1
            if not self.waiting[one.key]:
                self.offer(one)
