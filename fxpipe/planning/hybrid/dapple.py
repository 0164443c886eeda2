"""DAPPLE's planner, as its paper has it (section IV), with equation 1 corrected.

The time of a step is estimated and not simulated. Transfers count as stages of their own; Q is the pivot, the stage
that is never idle once it has begun (M micro-batches; F, B and A the forward, backward and all-reduce of a stage):

    L = warm-up           sum of F(s) for s = 0 .. Q
      + steady            (M - 1) (F(Q) + B(Q))
      + end               max over s of  A(s) + B(s) + ... + B(Q)              for s <= Q
                                         A(s) - (B(Q + 1) + ... + B(s - 1))    for s > Q

The paper puts s = Q in the second case, with - B(Q): then the last backward of a plan of one stage would shorten the
step. Stages after the pivot end their last backward before the pivot does, so their all-reduce begins earlier.

The search places layers from the first to the last. For each (layers done, devices in use) it keeps one prefix: the
best, if all layers left were one more stage. That is quick, but no exact dynamic programming, because which prefix is
best depends on what follows. Prefixes that cannot lead to a plan better than the best so far are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import NamedTuple

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage

from .device_placement import Counts, minus, placements, plus, positions, servers
from .event_time import Problem, fits, plan_of
from .simple_plans import one_each, whole


class Part(NamedTuple):
    """A stage, or a transfer: seconds of forward, backward and all-reduce."""

    forward: float
    backward: float
    all_reduce: float


def parts(problem: Problem, stages: Sequence[HybridStage]) -> list[Part]:
    """Stages and the transfers between them, alternating."""
    found = []
    for stage, after in zip(stages, (*stages[1:], None), strict=True):
        found.append(_stage(problem, stage))
        if after is not None:
            found.append(_transfer(problem, stage, after))
    return found


def _stage(problem: Problem, stage: HybridStage) -> Part:
    cost = problem.stage(stage.first, stage.end, stage.devices, stage.recompute)
    return Part(cost.forward, cost.again + cost.backward, cost.tail)


def _transfer(problem: Problem, a: HybridStage, b: HybridStage) -> Part:
    count = problem.chain.cuts[b.first]
    there, back = problem.rate(a.devices, b.devices), problem.rate(b.devices, a.devices)
    return Part(there.seconds(count), back.seconds(count), 0.0)


def pivot(line: Sequence[Part], micro_batches: int) -> int:
    """The position of the pivot, the stage that sets the pace (equation 3): from the last stage to the first, a stage
    becomes the pivot if its steady phase exceeds that of the pivot so far by more than the work between the two.

    >>> pivot([Part(1, 2, 0), Part(0, 0, 0), Part(1, 1, 0)], micro_batches=4)
    0
    """
    q, between = len(line) - 1, 0.0
    for s in range(len(line) - 2, -1, -1):
        if (micro_batches - 1) * (line[s][0] + line[s][1] - line[q][0] - line[q][1]) > between:
            q, between = s, 0.0
        else:
            between += line[s][0] + line[s][1]
    return q


def latency(line: Sequence[Part], micro_batches: int) -> float:
    """Seconds of a step: L, as above."""
    q = pivot(line, micro_batches)
    warm = ending = 0.0
    latest = -inf
    for s in range(q, -1, -1):
        forward, backward, all_reduce = line[s]
        warm += forward
        ending += backward
        if ending + all_reduce > latest:
            latest = ending + all_reduce
    past = 0.0
    for s in range(q + 1, len(line)):
        if line[s][2] - past > latest:
            latest = line[s][2] - past
        past += line[s][1]
    return warm + (micro_batches - 1) * (line[q][0] + line[q][1]) + latest


def plan_latency(problem: Problem, stages: Sequence[HybridStage]) -> float:
    """DAPPLE's estimate for a plan."""
    return latency(parts(problem, stages), problem.micro_batches)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Stages of the first layers and their parts, without the transfer to the next stage."""

    score: tuple[bool, float]  # whether it lacks memory, and the seconds, if the rest is one stage
    stages: tuple[HybridStage, ...]
    line: tuple[Part, ...]
    head: float  # forward and backward of the first stage
    bound: float  # no plan that starts like this takes less


def dapple(problem: Problem) -> HybridPlan:
    """The plan on all devices that fits in memory and has the least estimate that the search finds. Raises PlanError if
    none fits."""
    search = DappleSearch(problem)
    search.run()
    return plan_of(problem, search.stages)


Scored = tuple[tuple[bool, float], tuple[HybridStage, ...]]  # whether it lacks memory, and its seconds; its stages
NOTHING: Scored = ((True, inf), ())


class DappleSearch:
    """The prefixes found so far, and the best plan. It can be interrupted.

    - `recomputes`: whether it goes on to the stages for unlimited memory, which may fit if they recompute, if none fit.
    - `lacked`: whether any plan on the way did not fit in memory.
    - `ended`: whether all has been searched.
    """

    def __init__(self, problem: Problem, recomputes: bool = False) -> None:
        self.problem, self.recomputes = problem, recomputes
        self.groups = servers(problem.cluster)
        self.sizes: Counts = tuple(len(group) for group in self.groups)
        self.layers = len(problem.chain)
        self.work = [f + b for f, b in zip(problem.fast.forwards, problem.fast.backwards, strict=True)]
        self.lacked = self.ended = False
        self.open: list[dict[Counts, _Prefix]] = [{} for _ in range(self.layers)]
        self.best = NOTHING
        self._steps = self._search()

    def run(self, until: float = inf) -> bool:
        """Go on with the search until it ends (True) or until `until`, by `perf_counter` (False)."""
        self.ended = self.ended or all(perf_counter() <= until for _ in self._steps)
        return self.ended

    @property
    def stages(self) -> tuple[HybridStage, ...]:
        """Those of the best plan so far. Raises PlanError if none fits, and `recomputes` is False."""
        (lacks, _), stages = self.best
        if lacks:
            raise PlanError(f"no plan of {self.problem.chain.model} fits in the memory of the devices")
        return stages

    def _search(self) -> Iterator[None]:
        """Yields from time to time, so that the search can be interrupted."""
        yield from self._all()
        if self.best[0][0] and self.recomputes:
            self.problem = replace(self.problem, capped=False)
            self.open, self.best = [{} for _ in range(self.layers)], NOTHING
            yield from self._all()

    def _all(self) -> Iterator[None]:
        none = (0,) * len(self.sizes)
        starts = [whole] if self.layers < sum(self.sizes) else [whole, one_each]
        for stages in (start(self.problem) for start in starts):
            self._consider(stages, plan_latency(self.problem, stages))
        self.open[0][none] = _Prefix((True, inf), (), (), 0.0, 0.0)
        for first in range(self.layers):
            for used, prefix in sorted(self.open[first].items()):
                yield from self._extend(first, used, prefix)

    def _consider(self, stages: tuple[HybridStage, ...], seconds: float) -> tuple[bool, float]:
        lacks = self.problem.capped and not fits(self.problem, stages)
        self.lacked = self.lacked or lacks
        score = (lacks, seconds)
        if score < self.best[0]:
            self.best = score, stages
        return score

    def _extend(self, first: int, used: Counts, prefix: _Prefix) -> Iterator[None]:
        """Try one more stage after a prefix: every number of layers and devices, and every placement policy."""
        if self._hopeless(prefix.bound):
            return
        free = sum(self.sizes) - sum(used)
        for need in range(1, free):
            yield
            ends = self._ends(prefix, first, need, free - need)
            for counts in placements(self.sizes, used, need) if ends else ():
                taken = plus(used, counts)
                devices = positions(self.groups, used, counts)
                rest = positions(self.groups, taken, minus(self.sizes, taken))
                for end in ends:
                    own, left = self._bounds(prefix, first, end, need, len(rest))
                    before = self.open[end].get(taken)
                    known = before is not None and not before.score[0] and left >= before.score[1]
                    if not known and not self._hopeless(max(own, left)):
                        yield
                        self._try(prefix, HybridStage(first, end, devices), rest, taken)

    def _ends(self, prefix: _Prefix, first: int, need: int, rest: int) -> list[int]:
        """Where a stage of `need` devices may end, by bounds alone, which need no placement."""
        ends = []
        for end in range(first + 1, self.layers):
            own, left = self._bounds(prefix, first, end, need, rest)
            if self._hopeless(own):
                break  # the stage only grows
            if not self._hopeless(left):
                ends.append(end)
        return ends

    def _hopeless(self, bound: float) -> bool:
        return not self.best[0][0] and bound >= self.best[0][1]

    def _bounds(self, prefix: _Prefix, first: int, end: int, r: int, q: int) -> tuple[float, float]:
        """Two lower bounds on a plan's time: by one more stage on r devices, and by the rest on q devices, however the
        rest is cut.

        L is at least the steady phase of any stage plus the work of the first: only a stage before the pivot can have
        a longer steady phase than the pivot, and the work between the two makes up for that.
        """
        work, steady = self.work, self.problem.micro_batches - 1
        own, left = (work[end] - work[first]) * self.problem.share(r), (work[-1] - work[end]) / q
        head = prefix.head if prefix.stages else own
        return steady * own + head, steady * left + head

    def _try(self, prefix: _Prefix, stage: HybridStage, rest: tuple[int, ...], taken: Counts) -> None:
        """Remember the prefix with one more stage, if it is the best for its layers and devices."""
        problem, kind = self.problem, self.open[stage.end]
        own = _stage(problem, stage)
        last = HybridStage(stage.end, self.layers, rest)
        more = (_transfer(problem, prefix.stages[-1], stage), own) if prefix.stages else (own,)
        line = (*prefix.line, *more)
        seconds = latency((*line, _transfer(problem, stage, last), _stage(problem, last)), problem.micro_batches)
        before = kind.get(taken)
        if before is not None and (False, seconds) >= before.score:
            return
        score = self._consider((*prefix.stages, stage, last), seconds)
        if before is None or score < before.score:
            head = prefix.head if prefix.stages else own.forward + own.backward
            block = max(part.forward + part.backward for part in more)
            bound = max(prefix.bound, (problem.micro_batches - 1) * block + head)
            kind[taken] = _Prefix(score, (*prefix.stages, stage), line, head, bound)
