"""What stages cost when devices are counted and not named. Searches call this very often, so it is written for speed.

A shape is a plan without names: for each stage its end, how many devices of each run it has, and which way to cut its
ops. Stages recompute only if they do not fit in memory otherwise, since recomputation takes time.

A way has groups of devices in place of devices, and the costs of layers on those: it is a `Problem` of its own, on the
cluster of its groups. Groups are of neighbours of one run. Of the stages that share a run those of the largest groups
come first: where each size divides the next, any numbers of whole groups that fit in a run can be placed like that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_groups import groups
from fxpipe.ir.cluster.network import Rate, hand_over
from fxpipe.ir.plan.hybrid_plan import HybridStage, warmup_of
from fxpipe.planning.hybrid.event_time import Placed, Problem, StageTimes, step_time

from .device_symmetry import Counts, Devices, take

Stage = tuple[int, Counts, int]
Shape = tuple[Stage, ...]
Sizes = tuple[tuple[int, int, int], ...]  # of each stage the end, the replicas and the way


@dataclass(frozen=True)
class SpaceWay:
    """One way of stages to cut their ops.

    - `degree`: the devices of a group.
    - `problem`: what stages cost, on the cluster of groups.
    - `runs`: for each run of devices the positions of its groups in that cluster.
    """

    degree: int
    problem: Problem
    runs: tuple[Devices, ...]


def ways_of(problems: Sequence[tuple[int, Problem]], cluster: Cluster, runs: Sequence[Devices]) -> tuple[SpaceWay, ...]:
    """The ways with groups of these sizes."""
    found = []
    for degree, problem in problems:
        at = {own[0]: position for position, own in enumerate(groups(cluster, degree))}
        inside = tuple(tuple(at[d] for d in run[: len(run) // degree * degree] if d in at) for run in runs)
        found.append(SpaceWay(degree, problem, inside))
    return tuple(found)


@dataclass
class Shapes:
    """The costs of shapes on one cluster, remembered. `recompute` is whether stages must, must not (False) or may
    (None) recompute. `simulated` counts the plans whose events were followed."""

    ways: tuple[SpaceWay, ...]
    cluster: Cluster
    runs: tuple[Devices, ...]
    recompute: bool | None = None
    simulated: int = 0
    _stages: dict[tuple[int, int, Counts, int], tuple[StageTimes, ...]] = field(default_factory=dict)
    _links: dict[tuple[int, Counts, int, Counts, int], tuple[float, float]] = field(default_factory=dict)
    _rates: dict[tuple[Counts, int, Counts, int], tuple[Rate, Rate]] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem of the first way: all have the same layers, micro-batches and order of work."""
        return self.ways[0].problem

    def ahead(self, behind: int) -> int:
        """The forwards before the first backward of a stage with `behind` stages after it."""
        return warmup_of(self.problem.warmup, 0, behind + 1, self.problem.micro_batches)

    def stage(self, first: int, end: int, counts: Counts, way: int, ahead: int) -> StageTimes | None:
        """The cost of a stage, None if it does not fit in memory, or its devices form no groups."""
        key = (first, end, counts, way)
        kinds = self._stages.get(key)
        if kinds is None:
            own = self.ways[way]
            devices = self.taken(way, (0,) * len(counts), counts)
            again = (False, True) if self.recompute is None else (self.recompute,)
            made = (own.problem.stage(first, end, devices, how) for how in again)
            kinds = self._stages[key] = tuple(made) if devices else ()
        for cost in kinds:
            if cost.fixed + ahead * cost.kept + cost.once <= cost.room:
                return cost
        return None

    def taken(self, way: int, used: Counts, counts: Counts) -> Devices:
        """The positions of the groups of so many devices of each run; none if they form no whole groups."""
        own = self.ways[way]
        if own.degree == 1:
            return take(own.runs, used, counts)
        if any(count % own.degree for count in counts):
            return ()
        found = take(own.runs, [u // own.degree for u in used], tuple(count // own.degree for count in counts))
        return found if len(found) * own.degree == sum(counts) else ()

    def link(self, cut: int, senders: Counts, sent: int, receivers: Counts, received: int) -> tuple[float, float]:
        """Seconds for a micro-batch to cross from a stage of the way `sent` to one of the way `received`, and for its
        gradient to come back."""
        key = (cut, senders, sent, receivers, received)
        times = self._links.get(key)
        if times is None:
            count = self.ways[received].problem.chain.cuts[cut]
            there, back = self._rate(senders, sent, receivers, received)
            times = self._links[key] = there.seconds(count), back.seconds(count)
        return times

    def _rate(self, senders: Counts, sent: int, receivers: Counts, received: int) -> tuple[Rate, Rate]:
        mine, theirs = self.ways[sent], self.ways[received]
        if mine.degree == theirs.degree:
            a = self.taken(sent, (0,) * len(senders), senders)
            b = self.taken(received, senders, receivers)
            return mine.problem.rate(a, b), mine.problem.rate(b, a)
        key = (senders, mine.degree, receivers, theirs.degree)
        if key not in self._rates:
            shape = ((0, senders, sent), (0, receivers, received))
            a, b = self.positions(shape)
            before, after = (
                [own[at : at + way.degree] for at in range(0, len(own), way.degree)]
                for own, way in ((a, mine), (b, theirs))
            )
            self._rates[key] = hand_over(self.cluster, before, after, self.problem.chain.samples)
        return self._rates[key]

    def positions(self, shape: Shape) -> list[Devices]:
        """The positions of the devices of each stage; stages of the largest groups have the first ones of a run."""
        used = [0] * len(self.runs)
        found: list[Devices] = [()] * len(shape)
        for s in sorted(range(len(shape)), key=lambda s: -self.ways[shape[s][2]].degree):
            counts = shape[s][1]
            found[s] = take(self.runs, used, counts)
            used = [u + c for u, c in zip(used, counts, strict=True)]
        return found

    def time(self, shape: Shape, limit: float = inf) -> float:
        """The seconds of a step; inf if it does not fit, or takes `limit` or more."""
        n, m = len(shape), self.problem.micro_batches
        ahead = [self.ahead(n - 1 - s) for s in range(n)]
        costs, down, up, first = [], [], [0.0], 0
        for s, (end, counts, way) in enumerate(shape):
            cost = self.stage(first, end, counts, way, ahead[s])
            if cost is None:
                return inf
            costs.append(cost)
            first = end
        for (end, counts, way), (_, after, other) in pairwise(shape):
            there, back = self.link(end, counts, way, after, other)
            down.append(there)
            up.append(back)
        if limit < inf and path_bound(costs, ahead, down, up, m) >= limit:
            return inf
        self.simulated += 1
        return step_time(costs, ahead, down, up, m, limit)

    def stages(self, shape: Shape) -> tuple[HybridStage, ...]:
        """The stages of a shape, on positions of devices."""
        first, stages = 0, []
        for s, ((end, counts, way), devices) in enumerate(zip(shape, self.positions(shape), strict=True)):
            cost = self.stage(first, end, counts, way, self.ahead(len(shape) - 1 - s))
            again = bool(cost is not None and cost.again)
            stages.append(HybridStage(first, end, devices, again, self.ways[way].degree, way))
            first = end
        return tuple(stages)

    def placed(self, sizes: Sizes) -> Shape:
        """The shape of stages, with groups taken in the order of the cluster: of each run as many as there are left.
        Groups for which there is no room are left out; a stage without any fits in no memory."""
        left, shape = [len(run) for run in self.runs], []
        for end, replicas, way in sizes:
            degree, counts = self.ways[way].degree, []
            for x, room in enumerate(left):
                own = min(replicas, room // degree)
                replicas -= own
                left[x] -= own * degree
                counts.append(own * degree)
            shape.append((end, tuple(counts), way))
        return tuple(shape)

    def shape(self, stages: Sequence[HybridStage]) -> Shape:
        """The shape of stages on positions of devices."""
        return tuple((e.end, tuple(len(set(run) & set(e.devices)) for run in self.runs), e.way) for e in stages)

    def places(self, shape: Shape) -> list[Placed]:
        """The problem of each stage, and positions of groups like its own."""
        zero = (0,) * len(self.runs)
        return [(self.ways[way].problem, self.taken(way, zero, counts)) for _, counts, way in shape]


def path_bound(
    costs: Sequence[StageTimes], ahead: Sequence[int], down: Sequence[float], up: Sequence[float], m: int
) -> float:
    """Seconds that no step with these costs is below; see `lower_bound.py` for why."""
    cost = costs[-1]
    work = cost.forward + cost.again + cost.backward
    trip, done = work, m * work
    finish = done + cost.tail
    for s in range(len(costs) - 2, -1, -1):
        trip, done, finish = before(costs[s], ahead[s], down[s], up[s + 1], m, trip, done, finish)
    return finish


def before(
    cost: StageTimes, ahead: int, down: float, up: float, m: int, trip: float, done: float, finish: float
) -> tuple[float, float, float]:
    """Lower bounds in seconds for some last stages and one more before them, from those without it. All count from the
    moment at which the first of the stages gets its first micro-batch: `trip` until its first backward has ended,
    `done` until its last backward has ended, and `finish` until all stages have finished."""
    forward, again, backward = cost.forward, cost.again, cost.backward
    trip = max(ahead * forward + again, forward + down + trip + up) + backward
    own = trip + (m - 1) * (again + backward) + (m - ahead) * forward
    done = max(done + forward + down + up + backward, own)
    return trip, done, max(finish + forward + down, done + cost.tail)
