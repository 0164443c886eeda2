"""What stages cost when devices are counted and not named. Searches call this very often, so it is written for speed.

A shape is a plan without names: for each stage its end, and how many devices of each run it has. Stages recompute only
if they do not fit in memory otherwise, since recomputation takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

from fxpipe.ir.plan.hybrid_plan import HybridStage, warmup_of
from fxpipe.planning.hybrid.event_time import Problem, StageTimes, step_time

from .device_symmetry import Counts, Devices, take

Shape = tuple[tuple[int, Counts], ...]


@dataclass
class Shapes:
    """The costs of shapes of one problem, remembered. `recompute` is whether stages must, must not (False) or may
    (None) recompute. `simulated` counts the plans whose events were followed."""

    problem: Problem
    runs: tuple[Devices, ...]
    recompute: bool | None = None
    simulated: int = 0
    _stages: dict[tuple[int, int, Counts], tuple[StageTimes, ...]] = field(default_factory=dict)
    _links: dict[tuple[int, Counts, Counts], tuple[float, float]] = field(default_factory=dict)

    def ahead(self, behind: int) -> int:
        """The forwards before the first backward of a stage with `behind` stages after it."""
        return warmup_of(self.problem.warmup, 0, behind + 1, self.problem.micro_batches)

    def stage(self, first: int, end: int, counts: Counts, ahead: int) -> StageTimes | None:
        """The cost of a stage, None if it does not fit in memory."""
        key = (first, end, counts)
        kinds = self._stages.get(key)
        if kinds is None:
            devices = take(self.runs, (0,) * len(counts), counts)
            again = (False, True) if self.recompute is None else (self.recompute,)
            kinds = self._stages[key] = tuple(self.problem.stage(first, end, devices, how) for how in again)
        for cost in kinds:
            if cost.fixed + ahead * cost.kept + cost.once <= cost.room:
                return cost
        return None

    def link(self, cut: int, senders: Counts, receivers: Counts) -> tuple[float, float]:
        """Seconds for a micro-batch to cross, and for its gradient to come back."""
        key = (cut, senders, receivers)
        times = self._links.get(key)
        if times is None:
            a = take(self.runs, (0,) * len(senders), senders)
            b = take(self.runs, senders, receivers)
            count = self.problem.chain.cuts[cut]
            times = self.problem.rate(a, b).seconds(count), self.problem.rate(b, a).seconds(count)
            self._links[key] = times
        return times

    def time(self, shape: Shape, limit: float = inf) -> float:
        """The seconds of a step; inf if it does not fit, or takes `limit` or more."""
        n, m = len(shape), self.problem.micro_batches
        ahead = [self.ahead(n - 1 - s) for s in range(n)]
        costs, down, up, first = [], [], [0.0], 0
        for s, (end, counts) in enumerate(shape):
            cost = self.stage(first, end, counts, ahead[s])
            if cost is None:
                return inf
            costs.append(cost)
            if s + 1 < n:
                there, back = self.link(end, counts, shape[s + 1][1])
                down.append(there)
                up.append(back)
            first = end
        if limit < inf and path_bound(costs, ahead, down, up, m) >= limit:
            return inf
        self.simulated += 1
        return step_time(costs, ahead, down, up, m, limit)

    def stages(self, shape: Shape) -> tuple[HybridStage, ...]:
        """The stages of a shape, on positions of devices."""
        used, first, stages = [0] * len(self.runs), 0, []
        for s, (end, counts) in enumerate(shape):
            cost = self.stage(first, end, counts, self.ahead(len(shape) - 1 - s))
            devices = take(self.runs, used, counts)
            stages.append(HybridStage(first, end, devices, bool(cost is not None and cost.again)))
            used = [u + c for u, c in zip(used, counts, strict=True)]
            first = end
        return tuple(stages)

    def placed(self, sizes: Sequence[tuple[int, int]]) -> Shape:
        """The shape of stages (end, devices), with devices taken in the order of the cluster."""
        starts = list(accumulate((len(run) for run in self.runs), initial=0))
        at, shape = 0, []
        for end, r in sizes:
            shape.append((end, tuple(max(0, min(at + r, b) - max(at, a)) for a, b in pairwise(starts))))
            at += r
        return tuple(shape)

    def shape(self, stages: Sequence[HybridStage]) -> Shape:
        """The shape of stages on positions of devices."""
        return tuple((e.end, tuple(len(set(run) & set(e.devices)) for run in self.runs)) for e in stages)


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
