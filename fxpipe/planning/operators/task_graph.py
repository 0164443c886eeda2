"""The task graph of a strategy for one training step, in plain Python: the reference for the compiled core. With
several micro-batches it is that of the last one, after which gradients of weights are exchanged.

    F conv1 0 ─────────────────▶ F fc 0 ─▶ ... ─▶ B fc 0 ─────────────▶ B conv1 0 ─┐
        └──▶ T conv1 0 -> fc 1 ─▶ F fc 1 ─▶ ... ─▶ B fc 1 ─▶ T ─▶ B conv1 0        ├─▶ gathered ─▶ S conv1, each device
    F conv1 1 ...                                                 B conv1 1 ───────┘

- Each part of an operator is a forward and a backward task on its device.
- If a part reads what another made, its task waits for the other's: directly on one device, else for a transfer of the
  region they have in common, forward for the values and backward for their gradients (as many bytes).
- Where a region has several holders, a reader on one of their devices reads there, another one from the holder whose
  message takes least. Partial sums are added by an all-reduce, in a ring, before anything reads them. In backward each
  holder needs the gradient of all of the region: the gradients that readers give to the holders are added by an
  all-reduce. (These two are g and f of Megatron-LM.) But the copies of a reader all have the same gradient: each holder
  takes it from one of them, and nothing is added.
- Once all gradients of weights that several devices hold are there, the devices exchange them in a ring: each passes
  on 2 (n - 1) / n of what n devices hold. The SOAP paper sends them to one device and back: as many bytes, but the link
  of that device would be the bottleneck of every strategy.
  Gradients that only copies of one part have are the same, so they are not exchanged.
- The backward of an operator that is recomputed takes its forward's seconds, too. Messages and sums are not repeated:
  what a part received is kept.
- The update of the weights and the sending of the batch to the devices are not counted.

A task's key orders tasks that are ready at the same time. It follows from positions in the graph, never from the order
in which tasks are made, and no task has a smaller key than one it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import Operator, OperatorGraph, micro_batch
from fxpipe.ir.operators.strategy import Config, Region, Strategy, check, regions, summed_regions

from .input_regions import reads, volume
from .message_links import Links, links
from .operator_costs import Cost, part

Key = tuple[int, ...]
AFTER_PARTS = 1 << 20  # in the key of the sum of a region, forward: it comes after all parts of its operator


@dataclass(frozen=True)
class Task:
    """A computation, a message, or the gathering of gradients.

    - `kind`: F forward, B backward, T transfer, G all that an all-reduce adds up is there, S what a device passes on in
      the ring of an all-reduce.
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
    """All tasks of a training step, by keys; with several micro-batches, those of the last."""
    check(graph, strategy, len(cluster.devices))
    graph = micro_batch(graph, strategy.micro_batches)
    wires = links(cluster)
    sums = Sums(graph, strategy, wires)
    moves = tuple(transfers(graph, strategy, wires, sums))
    arriving: dict[Key, list[Key]] = {}
    for task, to in moves:
        arriving.setdefault(to, []).extend((task.key,) if task.size else task.after)
    found = [task for task, _ in moves if task.size]
    for at, (operator, config) in enumerate(zip(graph, strategy.configs, strict=True)):
        if operator.kind == "input":
            continue
        for k, (region, device) in enumerate(zip(summed_regions(operator, config), config.devices, strict=True)):
            forward, backward = cost(part(graph, operator, region), cluster.devices[device])
            f, b, total, label = sums.forward(at, k), sums.backward(at, k), sums.gradient(at, k), f"{operator.name} {k}"
            given = (*arriving.get(b, ()), *(sums.ends(total) if total in arriving else ()))
            found.append(Task(f, "F", device, forward, tuple(arriving.get(f, ())), label))
            again = forward if operator.name in strategy.group_of else 0.0
            found.append(Task(b, "B", device, backward + again, given or sums.value(at, k), label))
        found += sums.tasks(at, arriving)
    found += exchanges(graph, strategy, wires)
    return tuple(sorted(found, key=lambda task: task.key))


@dataclass(frozen=True)
class Sums:
    """The all-reduces of regions that have several holders, and the keys of all that computes and adds up."""

    graph: OperatorGraph
    strategy: Strategy
    wires: Links

    def forward(self, at: int, k: int) -> Key:
        return 0, at, k

    def backward(self, at: int, k: int) -> Key:
        return 1, len(self.graph) - 1 - at, k

    def partial(self, at: int) -> bool:
        """Whether the parts of an operator compute partial sums."""
        return self.graph.operators[at].summed > 0 and self.strategy.configs[at].holders > 1

    def total(self, at: int, k: int) -> Key:
        """The key of the sum of part k's region, once all parts of it are there."""
        return 0, at, AFTER_PARTS + k // self.strategy.configs[at].holders

    def gradient(self, at: int, k: int) -> Key:
        """The key of the sum of the gradients of part k's region; it comes before the backward of all parts."""
        return 1, len(self.graph) - 1 - at, k // self.strategy.configs[at].holders - AFTER_PARTS

    def at(self, key: Key) -> int:
        """The position of the operator that a key is of."""
        return len(self.graph) - 1 - key[1] if key[0] else key[1]

    def value(self, at: int, k: int) -> tuple[Key, ...]:
        """What there is to wait for until part k's device has the region."""
        return self.ends(self.total(at, k)) if self.partial(at) else (self.forward(at, k),)

    def ends(self, key: Key) -> tuple[Key, ...]:
        """The last tasks of the all-reduce with this key."""
        return tuple(task.key for task in self.ring(key)) or (key,)

    def ring(self, key: Key) -> tuple[Task, ...]:
        """What each device passes on in the all-reduce with this key."""
        at = self.at(key)
        operator, config = self.graph.operators[at], self.strategy.configs[at]
        first = (key[2] % AFTER_PARTS) * config.holders
        devices = sorted(set(config.devices[first : first + config.holders]))
        size = volume(regions(operator, config)[first]) * self.graph.element
        passed = 2 * (len(devices) - 1) / len(devices) * size
        return tuple(ring((*key, -1), (key,), dict.fromkeys(devices, passed), self.wires, operator.name))

    def tasks(self, at: int, arriving: Mapping[Key, Sequence[Key]]) -> Iterator[Task]:
        """The all-reduces of an operator: of partial sums, and of the gradients that readers give to its holders."""
        config = self.strategy.configs[at]
        for first in range(0, config.parts, config.holders):
            group = range(first, first + config.holders)
            sums = {self.gradient(at, first): tuple(arriving.get(self.gradient(at, first), ()))}
            if self.partial(at):
                sums[self.total(at, first)] = tuple(self.forward(at, k) for k in group)
            for key, after in sums.items():
                if after:
                    yield Task(key, "G", -1, 0.0, after, self.graph.operators[at].name)
                    yield from self.ring(key)


def followers(todo: Iterable[Task]) -> dict[Key, list[Task]]:
    """The tasks that wait for each task."""
    found: dict[Key, list[Task]] = {}
    for task in todo:
        for key in task.after:
            found.setdefault(key, []).append(task)
    return found


def transfers(graph: OperatorGraph, strategy: Strategy, wires: Links, sums: Sums) -> Iterator[tuple[Task, Key]]:
    """The transfers between parts, each with the key of the task that waits for it; of size 0 within a device."""
    devices = len(wires.number)
    for edge, (i, j, which) in enumerate(graph.edges):
        producer, consumer = graph.operators[i], graph.operators[j]
        if producer.kind == "input":
            continue
        a, b = strategy.configs[i], strategy.configs[j]
        copies = b.holders > 1 and not sums.partial(j)
        for way, k, m, elements in messages(graph, consumer, which, a, b, wires, copies):
            size, label = elements * graph.element, f"{producer.name} {k} -> {consumer.name} {m}"
            if way == 0:
                sender, receiver, after, to = a.devices[k], b.devices[m], sums.value(i, k), sums.forward(j, m)
                key = (*sums.total(i, k), k % a.holders) if sums.partial(i) else sums.forward(i, k)
                key = (*key, edge, m)
            else:
                sender, receiver, after = b.devices[m], a.devices[k], (sums.backward(j, m),)
                to = sums.backward(i, k) if copies or a.holders == 1 else sums.gradient(i, k)
                key = (*sums.backward(j, m), edge, k)
            if sender == receiver:
                yield Task(key, "T", -1, 0.0, after), to
            else:
                link, seconds = wires.number[sender][receiver], wires.seconds(sender, receiver, size)
                yield Task(key, "T", devices + link, seconds, after, label, size), to


def messages(
    graph: OperatorGraph, consumer: Operator, which: int, made: Config, taken: Config, wires: Links, copies: bool
) -> Iterator[tuple[int, int, int, int]]:
    """(0 forward or 1 backward, part of the producer, part of the consumer, number of elements) of each message along
    an edge. `copies`: whether parts of the consumer with one region are copies."""
    for r, m, elements in overlaps(graph, consumer, which, made, taken):
        held = range(r * made.holders, (r + 1) * made.holders)
        size = elements * graph.element
        k = nearest(held, made.devices, taken.devices[m], wires, size)
        yield 0, k, m, elements
        if not copies:
            yield 1, k, m, elements
        elif m % taken.holders == 0:
            same = range(m, m + taken.holders)
            for k in held:
                yield 1, k, nearest(same, taken.devices, made.devices[k], wires, size), elements


def nearest(parts: Iterable[int], devices: Sequence[int], to: int, wires: Links, size: float) -> int:
    """Of these parts the one on device `to`; if there is none, the one whose message to it takes least."""
    seconds = {k: 0.0 if devices[k] == to else wires.seconds(devices[k], to, size) for k in parts}
    return min(seconds, key=lambda k: (devices[k] != to, seconds[k]))


def overlaps(
    graph: OperatorGraph, consumer: Operator, which: int, made: Config, taken: Config
) -> Iterator[tuple[int, int, int]]:
    """(region of the producer, part of the consumer, number of elements of the first that the second reads). Regions
    are numbered; one that has several holders is one."""
    producer = graph.operator(consumer.inputs[which])
    written = regions(producer, made)[:: made.holders]
    for m, region in enumerate(summed_regions(consumer, taken)):
        wanted = reads(graph, consumer, region)[which]
        for r, one in enumerate(written):
            if common := volume(_common(one, wanted)):
                yield r, m, common


def _common(a: Region, b: Region) -> Region:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return tuple((low, max(low, high)) for low, high in pairs)


def ring(key: Key, after: tuple[Key, ...], passed: Mapping[int, float], wires: Links, label: str) -> Iterator[Task]:
    """What each device passes on to the next, given the bytes by device."""
    devices = sorted(passed)
    for at, device in enumerate(devices):
        if passed[device]:
            to = devices[(at + 1) % len(devices)]
            link, seconds = wires.number[device][to], wires.seconds(device, to, passed[device])
            yield Task((*key, device), "S", len(wires.number) + link, seconds, after, label, passed[device])


def exchanges(graph: OperatorGraph, strategy: Strategy, wires: Links) -> Iterator[Task]:
    """For each group of weights that several devices hold, the gathering of its gradients, and what each device that
    holds some of them passes on to the next."""
    last = len(graph) - 1
    for number, (name, group) in enumerate(weight_groups(graph).items()):
        held = holders(graph, strategy, group)
        size = graph.operators[group[0]].weights * graph.element / len(held)
        if all(one.summands < 2 or len(one.devices) < 2 for one in held):
            continue
        after = tuple((1, last - at, k) for at in group for k in range(strategy.configs[at].parts))
        yield Task((2, number), "G", -1, 0.0, after, name)
        passed = dict.fromkeys(set().union(*(one.devices for one in held)), 0.0)
        for one in held:
            for device in one.devices if one.summands > 1 else ():
                passed[device] += 2 * (len(one.devices) - 1) / len(one.devices) * size
        yield from ring((2, number), ((2, number),), passed, wires, name)


def weight_groups(graph: OperatorGraph) -> Mapping[str, tuple[int, ...]]:
    """The positions of the operators that hold the same weights, by the group's name, in order of first use."""
    found: dict[str, list[int]] = {}
    for at, operator in enumerate(graph):
        if operator.weights:
            found.setdefault(operator.weight_group, []).append(at)
    return {name: tuple(group) for name, group in found.items()}


@dataclass(frozen=True)
class Share:
    """A share of a group's weights.

    - `devices`: those that hold it.
    - `summands`: how many gradients are added up for it; copies of one part have the same gradient, which counts once.
    """

    devices: frozenset[int]
    summands: int


def holders(graph: OperatorGraph, strategy: Strategy, group: tuple[int, ...]) -> tuple[Share, ...]:
    """The shares of a group's weights. They are equal, and so small that each operator of the group cuts the weights
    between shares."""
    shards = {at: weight_shards(graph.operators[at], strategy.configs[at]) for at in group}
    shares = lcm(*(count for count, _ in shards.values()))
    held: list[set[int]] = [set() for _ in range(shares)]
    summands = [0] * shares
    for at in group:
        (count, numbers), config = shards[at], strategy.configs[at]
        copies = 1 if graph.operators[at].summed else config.holders
        for k, (number, device) in enumerate(zip(numbers, config.devices, strict=True)):
            for share in range(number * shares // count, (number + 1) * shares // count):
                held[share].add(device)
                summands[share] += k % copies == 0
    return tuple(map(Share, map(frozenset, held), summands))


def weight_shards(operator: Operator, config: Config) -> tuple[int, tuple[int, ...]]:
    """Into how many shards an operator's weights are cut, and which of them each part holds."""
    degrees = (*config.degrees, config.holders)
    is_cut = (*(role == "P" for role in operator.roles), operator.summed > 0)
    numbers = []
    for index in product(*map(range, degrees)):
        number = 0
        for degree, at, cut in zip(degrees, index, is_cut, strict=True):
            number = number * degree + at if cut else number
        numbers.append(number)
    return prod(degree for degree, cut in zip(degrees, is_cut, strict=True) if cut), tuple(numbers)
