"""The phases of the search for the optimal plan, and what they share: the cases, their bounds, the best plan so far.

A case is a number of micro-batches, a warm-up, and what replicas may share out. All cases look for one plan: the best
plan of any case is the one to beat in all, and a case whose bound is above its time is closed. `optimal` runs the
phases in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from math import inf, prod
from time import perf_counter

from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.planning.hybrid.event_time import Problem
from fxpipe.planning.hybrid.plan_request import EXACT, Request
from fxpipe.planning.hybrid.simple_plans import one_each

from . import lagrangian_bound as dual
from . import lower_bound as bounds
from .balanced_stages import Balance, balanced, even_seconds, in_order
from .branch_and_bound import Refutation, refute
from .device_symmetry import runs
from .local_search import Search, improve
from .relaxed_cluster import Relaxed, rates
from .relaxed_ways import RelaxedWays
from .shape_costs import Shape, Shapes, Sizes, ways_of

TABLE = 5_000_000  # additions to fill the tables, at most
PLACES = 1000  # choices of a count of devices for each run, at most


@dataclass
class Case:
    """One problem of the request. No plan of it takes less than `bound` seconds."""

    shapes: Shapes
    relaxed: RelaxedWays
    bound: float = 0.0
    share: float = 1.0  # how far to go from the bound to the best plan next,
    budget: float = 3000  # and the branches to spend on that

    @property
    def problem(self) -> Problem:
        return self.shapes.problem

    @property
    def devices(self) -> int:
        return len(self.shapes.cluster.devices)

    @property
    def tabled(self) -> bool:
        """Whether the tables of `lower_bound.py` are small enough to fill."""
        n, g, options = len(self.problem.chain), self.devices, len(self.relaxed.width)
        return n * n * g * options / 4 + n * g * options**2 / 6 <= TABLE

    @property
    def countable(self) -> bool:
        """Whether there are few enough placements to try them all."""
        inside = all(sum(map(len, way.runs)) == len(way.problem.cluster.devices) for way in self.shapes.ways)
        return inside and self.tabled and prod(len(run) + 1 for run in self.shapes.runs) <= PLACES

    @cached_property
    def parts(self) -> bounds.Parts:
        return bounds.parts(self.relaxed)

    def offers(self, sizes: Sizes) -> bool:
        """Whether there are devices for stages of these sizes."""
        return sum(r * self.shapes.ways[way].degree for _, r, way in sizes) <= self.devices


def cases_of(request: Request) -> list[Case]:
    """A case for each number of micro-batches, each warm-up and each of `Request.searches`. The cluster looks the same
    in all of them."""
    cluster, degrees = request.cluster, tuple(way.degree for way in request.every)
    found = []
    for one, m, warmup in product(request.searches, request.counts(), request.warmups):
        problems = one.problems(m, warmup)
        kinds = problems[0].kinds if max(degrees) == 1 else [device.server for device in cluster.devices]
        own = runs(cluster, kinds)
        ways = ways_of(tuple(zip(degrees, problems, strict=True)), cluster, own)
        best = (rates(problem, runs(problem.cluster, problem.kinds)) for problem in problems)
        relaxed = (Relaxed(two, rate, request.recompute) for two, rate in zip(problems, best, strict=True))
        shapes = Shapes(ways, cluster, own, request.recompute)
        found.append(Case(shapes, RelaxedWays(tuple(relaxed), degrees, len(cluster.devices))))
    return found


@dataclass
class PlanSearch:
    """The cases, and the best plan so far; of equal ones that of the first case: its number is `index`."""

    cases: list[Case]
    until: float
    index: int = 0
    shape: Shape = ()
    time: float = inf
    branches: int = 0
    pool: list[tuple[float, int, Shape]] = field(default_factory=list)  # seeds with their cases

    @property
    def case(self) -> Case | None:
        """The case of the best plan so far; None if there is no plan yet."""
        return self.cases[self.index] if self.time < inf else None

    def offer(self, index: int, shape: Shape) -> None:
        """Simulate a plan and keep it if it is the best."""
        self.keep(index, shape, self.cases[index].shapes.time(shape))

    def keep(self, index: int, shape: Shape, time: float) -> None:
        if time < inf:
            self.pool.append((time, index, shape))
        if (time, index) < (self.time, self.index):
            self.index, self.shape, self.time = index, shape, time


def begin(hunt: PlanSearch, known: Sequence[HybridPlan]) -> None:
    """Offer plans that are known from elsewhere."""
    for plan in known:
        for index, case in enumerate(hunt.cases):
            if (case.problem.micro_batches, case.problem.warmup) == (plan.micro_batches, plan.warmup):
                hunt.offer(index, case.shapes.shape(plan.stages))


def seed(hunt: PlanSearch) -> None:
    """Try the plainest plans of all cases, the most promising first; on many devices, only as many as time allows."""
    started = perf_counter()
    stop = started + (hunt.until - started) / 5
    for index, shape in _plain(hunt.cases):
        hunt.offer(index, shape)
        if hunt.case is not None and perf_counter() > stop:
            break


def _plain(cases: Sequence[Case]) -> Iterator[tuple[int, Shape]]:
    """The seeds of all cases, each with the index of its case: data parallelism and straight pipelines. If devices are
    of several kinds, the best pipeline of a device each is one of them."""
    waiting: list[tuple[float, int, int, tuple[int, ...], Balance | None]] = []  # by the least seconds that are known
    for index, case in enumerate(cases):
        problem = case.problem
        if len(problem.by_kind) > 1 and case.devices <= len(problem.chain):
            yield index, case.shapes.shape(one_each(problem))
        for number, way in enumerate(case.shapes.ways):
            for counts in dict.fromkeys(_devices(way.problem)):
                least = _straight(problem, counts, even_seconds(way.problem, counts))
                waiting.append((least, index, number, counts, None))
    heapify(waiting)
    while waiting:
        _, index, number, counts, one = heappop(waiting)
        shapes, problem = cases[index].shapes, cases[index].problem
        if one is not None:
            yield index, shapes.placed(tuple((end, count, number) for end, count in zip(one.ends, counts, strict=True)))
            continue
        one = balanced(shapes.ways[number].problem, in_order(counts), shapes.recompute)
        if one is not None:
            heappush(waiting, (_straight(problem, counts, one.seconds), index, number, counts, one))


def _straight(problem: Problem, counts: Sequence[int], slowest: float) -> float:
    """Seconds of a step of a straight pipeline whose slowest stage takes `slowest` for a micro-batch."""
    return (problem.micro_batches + len(counts) - 1) * slowest


def _devices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The devices of each stage in pipelines worth trying: about equal numbers; and equal ones that share out the
    samples of a micro-batch, whatever devices are left over."""
    n, g, samples = len(problem.chain), len(problem.cluster.devices), problem.chain.samples
    for k in [k for k in range(1, min(n, g) + 1) if k <= 8 or k % 4 == 0 or k in (n, g)]:
        yield tuple(b - a for a, b in pairwise(g * s // k for s in range(k + 1)))
        yield (1,) * k
        if samples is not None:
            yield (max(r for r in range(1, g // k + 1) if samples % r == 0),) * k
    for r in range(2, g + 1):
        if samples is not None and samples % r == 0:
            yield (r,) * min(g // r, n)


def close_in(hunt: PlanSearch) -> None:
    """Find a first bound for each case, then a higher one for those that are still open, and try the plans that come
    with them. Cases of the lowest bounds come first."""
    for case in hunt.cases:
        case.bound = case.relaxed.least_work * (1 - EXACT / 10)
    started = perf_counter()
    part = 1 / 3 if any(case.tabled for case in hunt.cases) else 2 / 3  # without tables nothing else raises bounds
    stop = started + (hunt.until - started) * part
    for look in (_first_bound, _higher_bound):
        for index, case in sorted(enumerate(hunt.cases), key=lambda pair: pair[1].bound):
            if perf_counter() > stop:
                return
            for sizes in dict.fromkeys(look(case, hunt.time, stop) if case.bound < hunt.time else ()):
                if hunt.case is not None and perf_counter() > stop:
                    return
                if case.offers(sizes):
                    hunt.offer(index, case.shapes.placed(sizes))


def _first_bound(case: Case, high: float, until: float) -> list[Sizes]:
    """Raise the bound of a case, and return the plans met on the way. `high` is the time of the best plan."""
    if not case.tabled:
        low, found = dual.search(case.relaxed, case.bound, min(high, _long(case)), until=until)
        case.bound = max(case.bound, low * (1 - EXACT))
        return found
    try:
        made = bounds.tables(case.relaxed, case.parts, high * (1 + EXACT), until)
    except bounds.OutOfTime:
        return []
    case.bound = max(case.bound, min(made.total, high))
    return [made.sizes] if made.sizes else []


def _higher_bound(case: Case, high: float, until: float) -> list[Sizes]:
    """As `_first_bound`, with several tables, where there can be tables."""
    if not case.tabled or high == inf:
        return []
    low, found = bounds.root(case.relaxed, case.parts, case.bound, high, 5, until)
    case.bound = max(case.bound, low)
    return found


def _long(case: Case) -> float:
    """Seconds that most plans take less than: all of the work on one device, with a transfer at each cut."""
    problem = case.problem
    chain = problem.slow
    busy = 2 * chain.forwards[-1] + chain.backwards[-1]
    rates = case.relaxed.ways[0].rates
    moved = sum(chain.cuts) * rates.share + len(chain) * rates.latency
    return problem.micro_batches * (busy + 2 * moved)


def polish(hunt: PlanSearch) -> None:
    """Improve the best few plans of different shapes."""
    started = perf_counter()
    stop = started + (hunt.until - started) / 3
    tried: set[tuple[int, Shape]] = set()
    for _, index, shape in sorted(hunt.pool)[:40]:
        case = hunt.cases[index]
        if (index, shape) in tried or case.bound >= hunt.time or perf_counter() > stop:
            continue
        tried.add((index, shape))
        if len(tried) > 4:
            break
        search = Search(case.shapes, stop, in_order=not case.countable)
        better, time = improve(search, shape, 1500 if case.countable else 20_000)
        hunt.keep(index, better, time)


def prove(hunt: PlanSearch, until: float) -> None:
    """Raise the bounds of the cases, the lowest first, until none is below the best plan. In cases with too many
    placements, look for better plans among those in the order of the devices."""
    open = [case for case in hunt.cases if case.tabled]
    while open and perf_counter() < until:
        case = min(open, key=lambda case: case.bound)
        if case.bound >= hunt.time * (1 - EXACT):
            break
        if hunt.time == inf:
            target, budget = inf, inf  # is there any plan at all?
        elif case.share == 1 or not case.countable:
            target, budget = hunt.time, case.budget
        else:
            target, budget = case.bound + case.share * (hunt.time - case.bound), case.budget
        try:
            made = bounds.tables(case.relaxed, case.parts, target * (1 + EXACT), until)
        except bounds.OutOfTime:
            break
        search = Refutation(case.shapes, made, target, until, budget, not case.countable)
        whole = refute(search)
        hunt.branches += search.nodes
        if search.best:
            hunt.keep(hunt.cases.index(case), search.best, search.limit)
        if not case.countable:
            case.budget *= 2
            if whole:
                open.remove(case)
        elif whole:
            case.bound = max(case.bound, search.limit if search.best else target)
            case.share = min(1.0, 2 * case.share)
        elif not search.best:
            case.share, case.budget = case.share / 2, 1.5 * case.budget
            if case.share < 1e-4:
                open.remove(case)
