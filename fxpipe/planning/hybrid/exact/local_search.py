"""Makes a plan faster by many small changes, some of which make it slower for a while (late acceptance).

A change is accepted if the plan is then no slower than it was `MEMORY` changes ago: the plan may get slower, but this
limit falls with time. `path_bound` alone rules out most changes, and most others are dropped half-way through their
events, since the limit is known. Changes are drawn from a fixed seed: the same problem gets the same changes, as many
as there is time for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from random import Random
from time import perf_counter

from .device_symmetry import Counts
from .shape_costs import Shape, Shapes

MEMORY = 150  # changes: a plan is compared with the one before them
PATIENCE = 4000  # changes without improvement, after which the search ends


@dataclass
class Search:
    """The shapes of a problem, and when to stop (`until`, by `perf_counter`). If `in_order`, stages take devices in the
    order of the cluster, as if there were one run: with very many runs most other placements are bad."""

    shapes: Shapes
    until: float
    in_order: bool = False
    random: Random = field(default_factory=lambda: Random(0))

    @cached_property
    def room(self) -> Counts:
        counts = tuple(len(run) for run in self.shapes.runs)
        return (sum(counts),) if self.in_order else counts

    def place(self, shape: Shape) -> Shape:
        if not self.in_order:
            return shape
        ways = self.shapes.ways
        return self.shapes.placed(tuple((end, sum(counts) // ways[way].degree, way) for end, counts, way in shape))

    def degree(self, shape: Shape, stage: int) -> int:
        """The devices of a group of a stage; stage -1 has the unused devices."""
        return self.shapes.ways[shape[stage][2]].degree if stage >= 0 else 1


def improve(search: Search, shape: Shape, patience: int = PATIENCE) -> tuple[Shape, float]:
    """The best shape met on the way, and the seconds of its step."""
    now = tuple((end, (sum(counts),), way) for end, counts, way in shape) if search.in_order else shape
    best, fastest = shape, search.shapes.time(shape)
    seconds = search.shapes.time(search.place(now))
    if seconds == inf:
        return best, fastest
    bars = [fastest] * MEMORY
    vain = step = 0
    while vain < patience and (step % 16 or perf_counter() < search.until):
        bar = max(bars[step % MEMORY], seconds)
        other = _change(search, now)
        if other is not None and other != now:
            time = search.shapes.time(search.place(other), bar * (1 + 1e-12))
            if time < inf:
                now, seconds = other, time
        bars[step % MEMORY] = min(bars[step % MEMORY], seconds)
        vain = 0 if seconds < fastest * (1 - 1e-9) else vain + 1
        if seconds < fastest:
            best, fastest = search.place(now), seconds
        step += 1
    return best, fastest


def _change(search: Search, shape: Shape) -> Shape | None:
    """One to three changes; those that help more often are drawn more often."""
    changed: Shape | None = shape
    changes = CHANGES if len(search.shapes.ways) == 1 else (*CHANGES, _switch, _switch)
    for _ in range(search.random.choice((1, 1, 1, 2, 2, 3))):
        if changed is not None:
            changed = search.random.choice(changes)(search, changed)
    return changed


def _move_cut(search: Search, shape: Shape) -> Shape | None:
    if len(shape) < 2:
        return None
    s = search.random.randrange(len(shape) - 1)
    end = shape[s][0] + search.random.choice((-3, -2, -1, -1, 1, 1, 2, 3))
    if not (shape[s - 1][0] if s else 0) < end < shape[s + 1][0]:
        return None
    return (*shape[:s], (end, *shape[s][1:]), *shape[s + 1 :])


def _move_layers(search: Search, shape: Shape) -> Shape | None:
    """Move several neighbouring cuts by one layer, so that a stage gives layers to one that is no neighbour."""
    if len(shape) < 3:
        return None
    by = search.random.choice((-1, 1))
    a, b = sorted(search.random.sample(range(len(shape) - 1), 2))
    moved = tuple((end + by if a <= s <= b else end, counts, way) for s, (end, counts, way) in enumerate(shape))
    ends = [0, *(stage[0] for stage in moved)]
    return moved if all(x < y for x, y in pairwise(ends)) else None


def _move_device(search: Search, shape: Shape) -> Shape | None:
    """Move a device, or a group of the larger size, from one stage to another; stage -1 has the unused devices."""
    random, n = search.random, len(shape)
    source, target = random.randint(-1, n - 1), random.randint(-1, n - 1)
    held, by = _counts(search, shape, source), max(search.degree(shape, source), search.degree(shape, target))
    runs = [x for x, count in enumerate(held) if count >= by]
    if source == target or not runs or (source >= 0 and sum(held) == by):
        return None
    run = random.choice(runs)
    return _given(_given(shape, source, run, -by), target, run, by)


def _swap_devices(search: Search, shape: Shape) -> Shape | None:
    """Exchange devices of two runs between two stages."""
    random, n = search.random, len(shape)
    if len(search.room) == 1:
        return _swap_sizes(search, shape)
    a, b = random.randint(-1, n - 1), random.randint(-1, n - 1)
    many = max(search.degree(shape, a), search.degree(shape, b))
    mine = [x for x, count in enumerate(_counts(search, shape, a)) if count >= many]
    theirs = [x for x, count in enumerate(_counts(search, shape, b)) if count >= many]
    if a == b or not mine or not theirs:
        return None
    x, y = random.choice(mine), random.choice(theirs)
    for stage, run, by in ((a, x, -many), (b, x, many), (b, y, -many), (a, y, many)):
        shape = _given(shape, stage, run, by)
    return shape


def _swap_sizes(search: Search, shape: Shape) -> Shape | None:
    """Exchange all devices of two stages, with the ways."""
    if len(shape) < 2:
        return None
    a, b = sorted(search.random.sample(range(len(shape)), 2))
    stages = list(shape)
    stages[a], stages[b] = (shape[a][0], *shape[b][1:]), (shape[b][0], *shape[a][1:])
    return tuple(stages)


def _merge(search: Search, shape: Shape) -> Shape | None:
    if len(shape) < 2:
        return None
    s = search.random.randrange(len(shape) - 1)
    (_, mine, way), (end, theirs, _) = shape[s : s + 2]
    both = tuple(x + y for x, y in zip(mine, theirs, strict=True))
    return (*shape[:s], (end, both, way), *shape[s + 2 :])


def _split(search: Search, shape: Shape) -> Shape | None:
    random = search.random
    s = random.randrange(len(shape))
    end, counts, way = shape[s]
    first, total, degree = (shape[s - 1][0] if s else 0), sum(counts), search.degree(shape, s)
    if end - first < 2 or total < 2 * degree:
        return None
    left, head = degree * random.randint(1, total // degree - 1), []
    for count in counts:
        head.append(min(left, count))
        left -= head[-1]
    tail = tuple(x - y for x, y in zip(counts, head, strict=True))
    return (*shape[:s], (random.randint(first + 1, end - 1), tuple(head), way), (end, tail, way), *shape[s + 1 :])


def _switch(search: Search, shape: Shape) -> Shape | None:
    """Give a stage, or all, another way; devices that form no whole groups go unused."""
    way, one = search.random.randrange(len(search.shapes.ways)), search.random.randrange(len(shape))
    degree, every = search.shapes.ways[way].degree, search.random.random() < 0.1
    stages = list(shape)
    for s, (end, counts, _) in enumerate(shape):
        if every or s == one:
            stages[s] = (end, tuple(count // degree * degree for count in counts), way)
    return tuple(stages) if all(any(counts) for _, counts, _ in stages) else None


CHANGES: tuple[Callable[[Search, Shape], Shape | None], ...] = (
    _move_cut,
    _move_cut,
    _move_layers,
    _move_device,
    _move_device,
    _swap_devices,
    _swap_sizes,
    _merge,
    _split,
)


def _counts(search: Search, shape: Shape, stage: int) -> Counts:
    if stage >= 0:
        return shape[stage][1]
    used = [sum(counts) for counts in zip(*(counts for _, counts, _ in shape), strict=True)]
    return tuple(room - u for room, u in zip(search.room, used, strict=True))


def _given(shape: Shape, stage: int, run: int, by: int) -> Shape:
    """The shape with `by` more devices of a run in a stage; stage -1 has the unused devices."""
    if stage < 0:
        return shape
    end, counts, way = shape[stage]
    counts = tuple(count + by if x == run else count for x, count in enumerate(counts))
    return (*shape[:stage], (end, counts, way), *shape[stage + 1 :])
