"""What parts of operators take on this machine, forward and backward: the costs that strategies are simulated with.

A part is rebuilt from its kind and sizes, on random values, and run by itself, or on several threads at once: workers
that are busy at the same time share caches and memory, and a part takes longer then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from statistics import median
from threading import Barrier
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.planning.operators.operator_costs import Cost, Part, Seconds
from fxpipe.planning.operators.task_graph import tasks

Run = Callable[[], Tensor]
Weight = Callable[..., Tensor]  # makes one of some sizes
UNROLLED = ("lstm",)  # kinds of which several operators add to the gradients of the same weights


@dataclass(frozen=True)
class Work:
    """What computes a part; and the tensors that have no gradient yet when it begins."""

    run: Run
    fresh: tuple[Tensor, ...]


class Parts:
    """Parts of operators, timed in turns, so that no part has the machine's fast or slow moments to itself; each on so
    many `workers` at once."""

    def __init__(self, parts: Iterable[Part], workers: int) -> None:
        self.workers = ThreadPoolExecutor(workers)  # threads that stay, with the memory that they have come to use
        self.works = {part: [make(part) for _ in range(workers)] for part in parts}
        self.times: dict[Part, list[Seconds]] = {part: [] for part in self.works}

    def time_each(self) -> None:
        """One more turn for each part."""
        for part, works in self.works.items():
            self.times[part] += together(works, self.workers)

    def cost(self) -> Cost:
        """The medians. Parts that compute nothing take no time. Raises KeyError for a part that is not one of these."""
        found = {part: tuple(map(median, zip(*times, strict=True))) for part, times in self.times.items()}

        def cost(part: Part, device: Device) -> Seconds:
            forward, backward = found[part] if computes(part) else (0.0, 0.0)
            return forward, backward

        return cost


def parts_of(graph: OperatorGraph, cluster: Cluster, strategies: Iterable[Strategy]) -> list[Part]:
    """All parts that occur in the strategies and compute something."""
    found: dict[Part, None] = {}

    def note(part: Part, device: Device) -> Seconds:
        found[part] = None
        return 0.0, 0.0

    for strategy in strategies:
        tasks(graph, cluster, strategy, note)
    return [part for part in found if computes(part)]


def computes(part: Part) -> bool:
    return part.operator.kind not in ("input", "flatten") and part.operator.work > 0


def together(works: Sequence[Work], workers: Executor) -> list[Seconds]:
    """Run each once forward and backward, at the same time as the others; a time before, to warm up."""
    barrier = Barrier(len(works))

    def run(work: Work) -> Seconds:
        once(work)
        barrier.wait()
        return once(work)

    return list(workers.map(run, works))


def once(work: Work) -> Seconds:
    """Seconds forward and backward."""
    for tensor in work.fresh:
        tensor.grad = None
    start = perf_counter()
    result = work.run()
    middle = perf_counter()
    if result.requires_grad:
        result.backward(torch.ones_like(result))
    return middle - start, perf_counter() - middle


def make(part: Part) -> Work:
    """What computes a part, of values and weights of its own."""
    kind = part.operator.kind
    if kind not in KINDS:
        raise ValueError(f"there is no way yet to measure an operator of kind {kind!r}; there are {', '.join(KINDS)}")
    reads = [torch.rand(read, requires_grad=part.gradients) for read in part.reads]
    weights: list[Tensor] = []

    def weight(*sizes: int) -> Tensor:
        weights.append(torch.randn(sizes, requires_grad=True))
        return weights[-1]

    run = KINDS[kind](part, reads, weight)
    found = tuple(run().shape)
    assert found == part.sizes, f"a part of kind {kind} is {found}, and should be {part.sizes}"
    return Work(run, (*reads, *(() if kind in UNROLLED else weights)))


def _conv2d(part: Part, reads: Sequence[Tensor], weight: Weight) -> Run:
    kernel, bias = weight(part.sizes[1], reads[0].shape[1], *part.operator.window), weight(part.sizes[1])
    around, own = _padding(part, reads[0])
    return lambda: F.relu(F.conv2d(around(reads[0]), kernel, bias, list(part.operator.stride), own))


def _pool2d(part: Part, reads: Sequence[Tensor], weight: Weight) -> Run:
    window, stride, (around, own) = part.operator.window, part.operator.stride, _padding(part, reads[0])
    return lambda: F.max_pool2d(around(reads[0]), list(window), list(stride), own)


def _padding(part: Part, x: Tensor) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """What puts zeros around a region, and how many the operator itself does: that of a whole image is its own, and
    what a part lacks is on one side of it."""
    whole = part.sizes[2:] == part.operator.sizes[2:]
    slides = zip(part.sizes[2:], x.shape[2:], part.operator.window, part.operator.stride, strict=True)
    lacking = [(size - 1) * stride + window - given for size, given, window, stride in slides]
    if whole:
        return lambda x: x, list(part.operator.padding)
    sides = [side for lack in reversed(lacking) for side in (0, lack)]
    return lambda x: F.pad(x, sides), [0] * len(lacking)


def _linear(part: Part, reads: Sequence[Tensor], weight: Weight) -> Run:
    matrix, bias = weight(part.sizes[-1], reads[0].shape[-1]), weight(part.sizes[-1])
    return lambda: F.linear(reads[0], matrix, bias)


def _embedding(part: Part, reads: Sequence[Tensor], weight: Weight) -> Run:
    words, channel = torch.randint(0, 100, tuple(part.sizes[:-1])), part.sizes[-1]
    table = weight(max(100, int(part.weights // channel)), channel)
    return lambda: F.embedding(words, table)


def _lstm(part: Part, reads: Sequence[Tensor], weight: Weight) -> Run:
    """A step with some of the channels of the state; with all of them, torch's own cell."""
    x, channel, whole = reads[0], part.sizes[-1], part.operator.output[-1].size
    h = reads[1] if len(reads) > 1 else torch.zeros(len(x), whole)
    c = torch.rand(len(x), channel, requires_grad=part.gradients)
    from_x, from_h = weight(4 * channel, x.shape[-1]), weight(4 * channel, h.shape[-1])
    of_x, of_h = weight(4 * channel), weight(4 * channel)
    if channel == whole:
        return lambda: torch.lstm_cell(x, (h, c), from_x, from_h, of_x, of_h)[0]

    def run() -> Tensor:
        gates = F.linear(x, from_x, of_x) + F.linear(h, from_h, of_h)
        i, f, g, o = gates.chunk(4, 1)
        return o.sigmoid() * (f.sigmoid() * c + i.sigmoid() * g.tanh()).tanh()

    return run


def _loss(part: Part, reads: Sequence[Tensor], weight: Weight) -> Run:
    labels = torch.zeros(prod(part.sizes), dtype=torch.long)
    return lambda: F.cross_entropy(reads[0].reshape(len(labels), -1), labels, reduction="none").reshape(part.sizes)


def _elementwise(part: Part, reads: Sequence[Tensor], weight: Weight) -> Run:
    return lambda: F.relu(sum(reads[1:], start=reads[0]))


KINDS: dict[str, Callable[[Part, Sequence[Tensor], Weight], Run]] = {
    "conv2d": _conv2d,
    "pool2d": _pool2d,
    "linear": _linear,
    "embedding": _embedding,
    "lstm": _lstm,
    "loss": _loss,
    "elementwise": _elementwise,
}
