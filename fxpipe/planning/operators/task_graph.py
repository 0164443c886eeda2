"""The task graph of a strategy for one training step, in plain Python: the reference for the compiled core.

    F conv1 0 ─────────────────▶ F fc 0 ─▶ ... ─▶ B fc 0 ─────────────▶ B conv1 0 ─┐
        └──▶ T conv1 0 -> fc 1 ─▶ F fc 1 ─▶ ... ─▶ B fc 1 ─▶ T ─▶ B conv1 0        ├─▶ gathered ─▶ S conv1, each device
    F conv1 1 ...                                                 B conv1 1 ───────┘

- Each part of an operator is a forward and a backward task on its device.
- If a part reads what another made, its task waits for the other's: directly on one device, else for a transfer of the
  region they have in common, forward for the values and backward for their gradients (as many bytes).
- Once all gradients of weights that several devices hold are there, the devices exchange them in a ring: each passes
  on 2 (n - 1) / n of what n devices hold. The SOAP paper sends them to one device and back: as many bytes, but the link
  of that device would be the bottleneck of every strategy.
- The update of the weights and the sending of the batch to the devices are not counted.

A task's key orders tasks that are ready at the same time. It follows from positions in the graph, never from the order
in which tasks are made, and no task has a smaller key than one it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Region, Strategy, check, regions

from .input_regions import reads, volume
from .message_links import Links, links
from .operator_costs import Cost, part

Key = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A computation, a message, or the gathering of gradients.

    - `kind`: F forward, B backward, T transfer, G all gradients of a group of weights are there, S their exchange.
    - `device`: its number; for a message the number of devices plus that of the link; -1 for G.
    - `seconds`: how long it takes.
    - `after`: the keys of the tasks that it waits for.
    - `size`: bytes of a message.
    """

    key: Key
    kind: str
    device: int
    seconds: float
    after: tuple[Key, ...] = ()
    label: str = ""
    size: float = 0.0


def tasks(graph: OperatorGraph, cluster: Cluster, strategy: Strategy, cost: Cost) -> tuple[Task, ...]:
    """All tasks of a training step, by keys."""
    check(graph, strategy, len(cluster.devices))
    wires = links(cluster)
    moves = tuple(transfers(graph, strategy, wires))
    arriving: dict[Key, list[Key]] = {}
    for task, to in moves:
        arriving.setdefault(to, []).append(task.key if task.size else task.after[0])
    found = [task for task, _ in moves if task.size]
    last = len(graph) - 1
    for at, (operator, config) in enumerate(zip(graph, strategy.configs, strict=True)):
        if operator.kind == "input":
            continue
        for k, (region, device) in enumerate(zip(regions(operator, config), config.devices, strict=True)):
            forward, backward = cost(part(graph, operator, region), cluster.devices[device])
            f, b, label = (0, at, k), (1, last - at, k), f"{operator.name} {k}"
            found.append(Task(f, "F", device, forward, tuple(arriving.get(f, ())), label))
            found.append(Task(b, "B", device, backward, tuple(arriving.get(b, (f,))), label))
    found += exchanges(graph, strategy, wires)
    return tuple(sorted(found, key=lambda task: task.key))


def followers(todo: Iterable[Task]) -> dict[Key, list[Task]]:
    """The tasks that wait for each task."""
    found: dict[Key, list[Task]] = {}
    for task in todo:
        for key in task.after:
            found.setdefault(key, []).append(task)
    return found


def transfers(graph: OperatorGraph, strategy: Strategy, wires: Links) -> Iterator[tuple[Task, Key]]:
    """The transfers between parts, each with the key of the task that waits for it; of size 0 within a device."""
    last, devices = len(graph) - 1, len(wires.number)
    for edge, (i, j, which) in enumerate(graph.edges):
        producer, consumer = graph.operators[i], graph.operators[j]
        if producer.kind == "input":
            continue
        a, b = strategy.configs[i], strategy.configs[j]
        for k, m, elements in overlaps(graph, consumer, which, a, b):
            size = elements * graph.element
            label = f"{producer.name} {k} -> {consumer.name} {m}"
            for sender, receiver, key, to in (
                (a.devices[k], b.devices[m], (0, i, k, edge, m), (0, j, m)),
                (b.devices[m], a.devices[k], (1, last - j, m, edge, k), (1, last - i, k)),
            ):
                if sender == receiver:
                    yield Task(key, "T", -1, 0.0, (key[:3],)), to
                else:
                    link, seconds = wires.number[sender][receiver], wires.seconds(sender, receiver, size)
                    yield Task(key, "T", devices + link, seconds, (key[:3],), label, size), to


def overlaps(
    graph: OperatorGraph, consumer: Operator, which: int, made: Config, taken: Config
) -> Iterator[tuple[int, int, int]]:
    """(part of the producer, part of the consumer, number of elements that the first makes and the second reads)."""
    producer = graph.operator(consumer.inputs[which])
    written = regions(producer, made)
    for m, region in enumerate(regions(consumer, taken)):
        wanted = reads(graph, consumer, region)[which]
        for k, one in enumerate(written):
            if common := volume(_common(one, wanted)):
                yield k, m, common


def _common(a: Region, b: Region) -> Region:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return tuple((low, max(low, high)) for low, high in pairs)


def exchanges(graph: OperatorGraph, strategy: Strategy, wires: Links) -> Iterator[Task]:
    """For each group of weights that several devices hold, the gathering of its gradients, and what each device that
    holds some of them passes on to the next."""
    last, devices = len(graph) - 1, len(wires.number)
    for number, (name, group) in enumerate(weight_groups(graph).items()):
        held = holders(graph, strategy, group)
        size = graph.operators[group[0]].weights * graph.element / len(held)
        ring = sorted(set().union(*held))
        if all(len(devices) < 2 for devices in held):
            continue
        after = tuple((1, last - at, k) for at in group for k in range(strategy.configs[at].parts))
        yield Task((2, number), "G", -1, 0.0, after, name)
        for at, device in enumerate(ring):
            passed = sum(2 * (len(one) - 1) / len(one) * size for one in held if device in one)
            if passed:
                to = ring[(at + 1) % len(ring)]
                link, seconds = wires.number[device][to], wires.seconds(device, to, passed)
                yield Task((2, number, device), "S", devices + link, seconds, ((2, number),), name, passed)


def weight_groups(graph: OperatorGraph) -> Mapping[str, tuple[int, ...]]:
    """The positions of the operators that hold the same weights, by the group's name, in order of first use."""
    found: dict[str, list[int]] = {}
    for at, operator in enumerate(graph):
        if operator.weights:
            found.setdefault(operator.weight_group, []).append(at)
    return {name: tuple(group) for name, group in found.items()}


def holders(graph: OperatorGraph, strategy: Strategy, group: tuple[int, ...]) -> tuple[frozenset[int], ...]:
    """For each share of a group's weights the devices that hold it. Shares are equal, and so small that each operator
    of the group cuts the weights between shares."""
    shards = {at: weight_shards(graph.operators[at], strategy.configs[at]) for at in group}
    shares = lcm(*(count for count, _ in shards.values()))
    held: list[set[int]] = [set() for _ in range(shares)]
    for at in group:
        count, numbers = shards[at]
        for number, device in zip(numbers, strategy.configs[at].devices, strict=True):
            for share in range(number * shares // count, (number + 1) * shares // count):
                held[share].add(device)
    return tuple(map(frozenset, held))


def weight_shards(operator: Operator, config: Config) -> tuple[int, tuple[int, ...]]:
    """Into how many shards an operator's weights are cut, and which of them each part holds."""
    cut = [degree if role == "P" else 1 for degree, role in zip(config.degrees, operator.roles, strict=True)]
    numbers = []
    for index in product(*map(range, config.degrees)):
        number = 0
        for degree, at, role in zip(config.degrees, index, operator.roles, strict=True):
            number = number * degree + at if role == "P" else number
        numbers.append(number)
    return prod(cut), tuple(numbers)
