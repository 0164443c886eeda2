"""A lower bound by Lagrangian relaxation, for more devices than tables can count; also finds good plans.

Let each device cost `price` seconds. Every plan that takes less than `limit` fulfils

    sum over stages of (forward + backward + transfers + price x replicas)  +  (M - 1) x work of the last stage
        <  limit + price x devices of the cluster

and each of its stages has at least as many replicas as it needs to run all micro-batches within `limit`. The price
takes the place of the devices that stages share, so the least left side comes from dynamic programming over layers
alone: the best way and number of replicas of a stage follow from the price, where a replica costs as much as its
devices. If for some price the least left side is not below the right side, no plan takes less than `limit`. Half of a
transfer counts at each of its ends, as if the other end had no fewer devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import floor, inf, sqrt
from time import perf_counter

from fxpipe.ir.replica_shares import fewest

from .lower_bound import OutOfTime
from .relaxed_cluster import Relaxed
from .relaxed_ways import RelaxedWays
from .shape_costs import Sizes


@dataclass(frozen=True)
class LagrangianBound:
    """The least left side less the price of all devices, in seconds, and the plan that has it."""

    seconds: float
    sizes: Sizes


def dual(relaxed: RelaxedWays, limit: float, price: float, floors: list[float], until: float = inf) -> LagrangianBound:
    """The dynamic programming for one price; `inf` seconds if some layer fits in no stage. `floors[a]` is a lower bound
    on the seconds of the stages before layer a. It is raised where this price gives a higher one: the layers from a on
    need their share of the devices, and the stages before have only the rest. Raises OutOfTime at `until`, by
    `perf_counter`."""
    m, devices, latency = relaxed.problem.micro_batches, relaxed.devices, relaxed.latency
    n, work = len(relaxed.problem.chain), list(accumulate(relaxed.layer_work, initial=0.0))
    ways = [_costs(relaxed, way) for way in range(len(relaxed.ways))]
    delay = [latency if all(one.chain.cuts[b] for one in relaxed.ways) else 0.0 for b in range(n + 1)]
    least = [0.0] + [inf] * n
    came: list[tuple[int, int, int]] = [(0, 0, 0)] * (n + 1)
    for b in range(1, n + 1):
        if perf_counter() > until:
            raise OutOfTime
        times = m if b == n else 1
        spare = devices - m * (work[n] - work[b - 1]) / limit
        floors[b - 1] = max(floors[b - 1], least[b - 1] - price * spare if b > 1 else 0.0)
        for a in range(b - 1, -1, -1):
            if m * (work[b] - work[a]) > limit * devices:
                break
            if least[a] == inf:
                continue
            for way, (one, degree, most, total, taken, given) in enumerate(ways):
                r = _fewest(one, a, b, most, limit, floors[a])
                if r > most:
                    continue
                load = times * (total[b] - total[a]) + taken[a] + given[b]
                own, r = _cheapest(one, r, most, load, price * degree)
                seconds = least[a] + own + delay[a] + delay[b]
                if seconds < least[b]:
                    least[b], came[b] = seconds, (a, r, way)
    if least[n] == inf:
        return LagrangianBound(inf, ())
    sizes, b = [], n
    while b:
        a, r, way = came[b]
        sizes.append((b, r, way))
        b = a
    return LagrangianBound(least[n] - price * devices, tuple(reversed(sizes)))


def _costs(relaxed: RelaxedWays, way: int) -> tuple[Relaxed, int, int, list[float], list[float], list[float]]:
    """Of a way: its costs, the devices of a group, the number of groups, running sums of seconds, and for each cut half
    of what a transfer takes of the stage after it, and of the stage before it."""
    one = relaxed.ways[way]
    chain = one.chain
    total = [f + b for f, b in zip(chain.forwards, chain.backwards, strict=True)]
    taken = [count * one.rates.share for count in chain.cuts]
    given = [relaxed.given(way, cut) for cut in range(len(chain) + 1)]
    return one, relaxed.degrees[way], relaxed.groups[way], total, taken, given


def _cheapest(relaxed: Relaxed, least: int, devices: int, load: float, price: float) -> tuple[float, int]:
    """The least share of `load` and price of at least `least` replicas, and their number. Of whole samples only numbers
    are tried that leave the first replica fewer of them."""
    problem, samples = relaxed.problem, relaxed.chain.samples
    if samples is None:
        best = sqrt(load / price) if price else devices
        r, more = (min(devices, max(least, floor(best) + by)) for by in (0, 1))
        return min((load / r + price * r, r), (load / more + price * more, more))
    found, r = (load * problem.share(least) + price * least, least), least
    while True:
        r = fewest(samples, problem.share(r) - 0.5 / samples)
        if not 0 < r <= devices or price * r >= found[0]:
            return found
        found = min(found, (load * problem.share(r) + price * r, r))


def _fewest(relaxed: Relaxed, a: int, b: int, devices: int, limit: float, before: float) -> int:
    """The least replicas with which a stage runs all micro-batches within `limit` less `before`, the seconds of the
    stages before it, or less its own all-reduce, whichever is longer."""
    chain, m = relaxed.chain, relaxed.problem.micro_batches
    backward = chain.backwards[b] - chain.backwards[a]
    work = m * (chain.forwards[b] - chain.forwards[a] + backward)
    parameters = chain.parameters[b] - chain.parameters[a]
    overlaps = relaxed.problem.all_reduce == "overlap"
    slow = relaxed.problem.slow
    hides = slow.backwards[b] - slow.backwards[a]
    r = relaxed.held(a, b)
    while r <= devices:  # more replicas take longer to add up: each round may ask for more
        tail = 0.0 if relaxed.problem.optimizer_sharding == "zero3" else relaxed.ring(r).seconds(parameters)
        if overlaps:
            tail = max(0.0, tail - hides * relaxed.problem.share(r))
        left = limit - max(before, tail)
        share = left / work * (1 + 1e-12) if work else left
        needed = fewest(chain.samples, min(share, 1.0)) or devices + 1
        if needed <= r:
            break
        r = needed
    return r


def search(
    relaxed: RelaxedWays, low: float, high: float, steps: int = 12, until: float = inf
) -> tuple[float, list[Sizes]]:
    """The highest limit between `low`, a known bound, and `high` that some price refutes, by bisection, and the plans
    on the way that do not use too many devices. It ends at `until`, by `perf_counter`."""
    found: list[Sizes] = []
    for _ in range(steps):
        if low >= high * (1 - 1e-3):
            break
        middle = (low + high) / 2
        try:
            refuted = _refuted(relaxed, middle, found, until)
        except OutOfTime:
            break
        low, high = (middle, high) if refuted else (low, middle)
    return low, found


def _refuted(relaxed: RelaxedWays, limit: float, found: list[Sizes], until: float) -> bool:
    """Whether some price refutes the limit. Raises the price until a plan uses no more devices than there are, then
    bisects: the bound is concave in the price. Raises OutOfTime at `until`."""
    few, many, floors = 0.0, limit / relaxed.devices, [0.0] * len(relaxed.problem.chain)
    for _ in range(30):
        made = dual(relaxed, limit, many, floors, until)
        if made.seconds >= limit:
            return True
        if sum(r * relaxed.degrees[way] for _, r, way in made.sizes) <= relaxed.devices:
            found.append(made.sizes)
            break
        few, many = many, 4 * many
    for _ in range(10):
        price = (few + many) / 2
        made = dual(relaxed, limit, price, floors, until)
        if made.seconds >= limit:
            return True
        if sum(r * relaxed.degrees[way] for _, r, way in made.sizes) <= relaxed.devices:
            found.append(made.sizes)
            many = price
        else:
            few = price
    return False
