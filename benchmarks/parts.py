"""What parts of operators take on this machine, forward and backward: the costs that strategies are simulated with.

A part is rebuilt from its kind and sizes, on random values, and run on two threads at once: workers that are busy at
the same time share caches and memory, and a part that runs alone is faster than in a step. Each part is measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from statistics import median
from threading import Barrier, Thread
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.ir.cluster import Device
from fxpipe.soap.costs import Cost, Part, Seconds, once

Run = Callable[[], Tensor]
WORKERS = 2


def measured(rounds: int = 7) -> Cost:
    """The median of several runs, for each part once."""

    def cost(part: Part, device: Device) -> Seconds:
        if part.operator.kind in ("input", "flatten") or not part.operator.work:
            return 0.0, 0.0
        barrier = Barrier(WORKERS)
        found: list[list[Seconds]] = [[] for _ in range(WORKERS)]
        threads = [Thread(target=_time, args=(make(part), barrier, times, rounds)) for times in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        forward, backward = zip(*(seconds for times in found for seconds in times), strict=True)
        return median(forward), median(backward)

    return once(cost)


def _time(run: Run, barrier: Barrier, times: list[Seconds], rounds: int) -> None:
    """Run forward and backward, at the same time as the other threads; the first time warms up."""
    for turn in range(rounds + 1):
        barrier.wait()
        start = perf_counter()
        result = run()
        middle = perf_counter()
        if result.requires_grad:
            result.backward(torch.ones_like(result))
        if turn:
            times.append((middle - start, perf_counter() - middle))


def make(part: Part) -> Run:
    """What computes a part, of values and weights of its own."""
    kind, sizes = part.operator.kind, part.sizes
    reads = [torch.rand(read, requires_grad=part.gradients) for read in part.reads]
    if kind not in KINDS:
        raise ValueError(f"there is no way yet to measure an operator of kind {kind!r}; there are {', '.join(KINDS)}")
    run = KINDS[kind](part, reads, sizes)
    assert tuple(run().shape) == tuple(sizes), f"a part of kind {kind} is {tuple(run().shape)}, and should be {sizes}"
    return run


def _weight(*sizes: int) -> Tensor:
    return torch.randn(sizes, requires_grad=True)


def _conv2d(part: Part, reads: Sequence[Tensor], sizes: Sequence[int]) -> Run:
    weight, bias = _weight(sizes[1], reads[0].shape[1], *part.operator.window), _weight(sizes[1])
    padding = _padding(part, reads[0])
    return lambda: F.relu(F.conv2d(F.pad(reads[0], padding), weight, bias, stride=list(part.operator.stride)))


def _pool2d(part: Part, reads: Sequence[Tensor], sizes: Sequence[int]) -> Run:
    window, stride, padding = (list(part.operator.window), list(part.operator.stride), _padding(part, reads[0]))
    return lambda: F.max_pool2d(F.pad(reads[0], padding), window, stride)


def _padding(part: Part, x: Tensor) -> list[int]:
    """What is missing around a region: at the border of the image. Where it is, is all the same."""
    slides = zip(part.sizes[2:], x.shape[2:], part.operator.window, part.operator.stride, strict=True)
    lacking = [(size - 1) * stride + window - given for size, given, window, stride in slides]
    return [side for lack in reversed(lacking) for side in (lack // 2, lack - lack // 2)]


def _linear(part: Part, reads: Sequence[Tensor], sizes: Sequence[int]) -> Run:
    weight, bias = _weight(sizes[-1], reads[0].shape[-1]), _weight(sizes[-1])
    return lambda: F.linear(reads[0], weight, bias)


def _embedding(part: Part, reads: Sequence[Tensor], sizes: Sequence[int]) -> Run:
    words, channel = torch.randint(0, 100, tuple(sizes[:-1])), sizes[-1]
    table = _weight(max(100, int(part.weights // channel)), channel)
    return lambda: F.embedding(words, table)


def _lstm(part: Part, reads: Sequence[Tensor], sizes: Sequence[int]) -> Run:
    """A step with some of the channels of the state; with all of them, torch's own cell."""
    x, channel, whole = reads[0], sizes[-1], part.operator.output[-1].size
    h = reads[1] if len(reads) > 1 else torch.zeros(len(x), whole)
    c = torch.rand(len(x), channel, requires_grad=part.gradients)
    from_x, from_h = _weight(4 * channel, x.shape[-1]), _weight(4 * channel, h.shape[-1])
    of_x, of_h = _weight(4 * channel), _weight(4 * channel)
    if channel == whole:
        return lambda: torch.lstm_cell(x, (h, c), from_x, from_h, of_x, of_h)[0]

    def run() -> Tensor:
        gates = F.linear(x, from_x, of_x) + F.linear(h, from_h, of_h)
        i, f, g, o = gates.chunk(4, 1)
        return o.sigmoid() * (f.sigmoid() * c + i.sigmoid() * g.tanh()).tanh()

    return run


def _loss(part: Part, reads: Sequence[Tensor], sizes: Sequence[int]) -> Run:
    labels = torch.zeros(prod(sizes), dtype=torch.long)
    return lambda: F.cross_entropy(reads[0].reshape(len(labels), -1), labels, reduction="none").reshape(tuple(sizes))


def _elementwise(part: Part, reads: Sequence[Tensor], sizes: Sequence[int]) -> Run:
    return lambda: F.relu(sum(reads[1:], start=reads[0]))


KINDS: dict[str, Callable[[Part, Sequence[Tensor], Sequence[int]], Run]] = {
    "conv2d": _conv2d,
    "pool2d": _pool2d,
    "linear": _linear,
    "embedding": _embedding,
    "lstm": _lstm,
    "loss": _loss,
    "elementwise": _elementwise,
}
