"""The event time against an evaluator that knows nothing of rounds or sums: it is written from the definition, task by
task, with exact fractions, and slow."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf

import pytest

from fxpipe.ir.cluster.cluster import Cluster, Device, Switch
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, check
from fxpipe.ir.plan.kind_times import KindTimes
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.event_time import Problem, event_time


def servers(count: int, each: int, intra: float, inter: float, latency: float, memory: int = 10**18) -> Cluster:
    devices = tuple(Device(f"g{i}", memory, 1e12, 1e12, f"s{i // each}") for i in range(count * each))
    inside = tuple(
        Switch(f"s{s}", tuple(f"g{i}" for i in range(s * each, (s + 1) * each)), intra, latency) for s in range(count)
    )
    outside = (Switch("network", tuple(f"s{s}" for s in range(count)), inter, latency),)
    return Cluster(devices, switches=inside + (outside if count > 1 else ()))


# The definition, slowly ---------------------------------------------------------------------------------------------


def ends(samples, replicas):
    """Where the slices of a micro-batch end: at whole samples, the first slices larger by one; with None all equal."""
    if samples is None:
        return [Fraction(k, replicas) for k in range(replicas + 1)]
    each = [samples // replicas + (k < samples % replicas) for k in range(replicas)]
    return [Fraction(sum(each[:k]), samples) for k in range(replicas + 1)]


def transfer(samples, count, senders, receivers, each, intra, inter, latency):
    """Bytes per port, then the slowest port."""
    if count == 0:
        return Fraction(0)
    use: dict[tuple[str, int, str], Fraction] = {}
    ours, theirs = ends(samples, len(senders)), ends(samples, len(receivers))
    for i, a in enumerate(sorted(senders)):
        for j, b in enumerate(sorted(receivers)):
            low = max(ours[i], theirs[j])
            high = min(ours[i + 1], theirs[j + 1])
            if high > low:
                kind, x, y, pace = (
                    ("device", a, b, intra) if a // each == b // each else ("server", a // each, b // each, inter)
                )
                for key in ((kind, x, "out"), (kind, y, "in")):
                    use[key] = use.get(key, Fraction(0)) + (high - low) * count / pace
    return latency + max(use.values())


def ring(count, devices, each, intra, inter, latency):
    r = len(devices)
    pace = intra if len({d // each for d in devices}) == 1 else inter
    return Fraction(0) if r == 1 or not count else Fraction(2 * (r - 1), r) * count / pace + 2 * (r - 1) * latency


def slowest(chain, way, stage, layers):
    """Seconds of some layers of a stage for a micro-batch: those of the replica that takes longest for its share."""
    own = {"forwards": [e.forward for e in chain.layers], "backwards": [e.backward for e in chain.layers]}[way]
    kinds = {one.kind: getattr(one, way) for one in chain.kinds}
    places = ends(chain.samples, len(stage.devices))
    return max(
        (b - a) * sum(Fraction(kinds.get(f"g{device}", own)[layer]) for layer in layers)
        for device, (a, b) in zip(stage.devices, pairwise(places), strict=True)
    )


def slow_event_time(chain, stages, m, warmup, mode, network, copies, memory):
    n = len(stages)
    ahead = [min(m, n - s if warmup == "early" else 2 * (n - s) - 1) for s in range(n)]
    rows = []
    for s in range(n):
        row = [("F", s, i) for i in range(ahead[s])]
        for i in range(m):
            row.append(("B", s, i))
            if ahead[s] + i < m:
                row.append(("F", s, ahead[s] + i))
        rows.append(row)
    layers = [chain.layers[e.first : e.end] for e in stages]
    shares = [max(b - a for a, b in pairwise(ends(chain.samples, len(e.devices)))) for e in stages]
    for s, own in enumerate(layers):
        held = (
            copies * sum(Fraction(e.parameters) for e in own)
            + ahead[s] * sum(Fraction(e.saved) for e in own) * shares[s]
        )
        if held > memory:
            return inf
    seconds = {
        "F": [slowest(chain, "forwards", e, range(e.first, e.end)) for e in stages],
        "B": [slowest(chain, "backwards", e, range(e.first, e.end)) for e in stages],
    }
    end: dict[tuple[str, int, int], Fraction] = {}
    sent: dict[tuple[str, int, int], Fraction] = {}  # arrival of what a task has made
    for _ in range(2 * n * m):
        for s, row in enumerate(rows):  # whichever can run next; each stage in its own order
            position = sum(task in end for task in row)
            if position == len(row):
                continue
            kind, _, i = row[position]
            source = s - 1 if kind == "F" else s + 1
            if 0 <= source < n and (kind, source, i) not in sent:
                continue
            start = end[row[position - 1]] if position else Fraction(0)
            if 0 <= source < n:
                start = max(start, sent[kind, source, i])
            end[kind, s, i] = start + seconds[kind][s]
            target = s + 1 if kind == "F" else s - 1
            if 0 <= target < n:
                count = Fraction(layers[min(s, target)][-1].cut)
                time = transfer(chain.samples, count, stages[s].devices, stages[target].devices, *network)
                before = sent.get((kind, s, i - 1), Fraction(0))
                sent[kind, s, i] = max(end[kind, s, i], before) + time
    finish = []
    for s, own in enumerate(layers):
        at = end["B", s, m - 1]
        if mode == "end":
            at += ring(sum(Fraction(e.parameters) for e in own), stages[s].devices, *network)
        else:
            begins, free = at - seconds["B"][s], Fraction(0)
            for j in range(stages[s].end - 1, stages[s].first - 1, -1):
                ready = begins + slowest(chain, "backwards", stages[s], range(j, stages[s].end))
                size = Fraction(chain.layers[j].parameters)
                free = max(free, ready) + ring(size, stages[s].devices, *network)
            at = max(at, free)
        finish.append(at)
    return max(finish)


# Random problems and plans ------------------------------------------------------------------------------------------


def random_chain(rng: random.Random, n: int) -> Chain:
    layers = (
        Layer(
            f"l{i}",
            rng.uniform(0.001, 0.02),
            rng.uniform(0.001, 0.04),
            rng.choice([0, rng.uniform(1e6, 1e8)]),
            rng.uniform(1e6, 1e8),
            rng.choice([0, rng.uniform(1e5, 1e8)]),
        )
        for i in range(n)
    )
    made = tuple(layers)
    return Chain("m", rng.choice([1, 2, 3, 4, 5, 7, 8]), made, ideal_shares=rng.random() < 0.3)


def on_unequal(rng: random.Random, chain: Chain, devices: int) -> Chain:
    """The chain with other times on some of the devices g0, g1 ..; some of them are alike."""
    kinds = [
        [(rng.choice([0.5, 2.0]) * rng.uniform(0.7, 1.3), rng.uniform(0.5, 3)) for _ in chain.layers] for _ in range(2)
    ]
    slow = {device: rng.choice(kinds) for device in range(devices) if rng.random() < 0.6}
    found = (
        KindTimes(
            f"g{device}",
            tuple(e.forward * f for e, (f, _) in zip(chain.layers, by, strict=True)),
            tuple(e.backward * b for e, (_, b) in zip(chain.layers, by, strict=True)),
        )
        for device, by in slow.items()
    )
    return replace(chain, kinds=tuple(found))


def random_stages(rng: random.Random, n: int, devices: int) -> tuple[HybridStage, ...]:
    k = rng.randint(1, min(n, devices))
    ends = [0, *sorted(rng.sample(range(1, n), k - 1)), n]
    order = rng.sample(range(devices), devices)
    borders = [0, *sorted(rng.sample(range(1, devices), k - 1)), rng.randint(k, devices)]
    borders = [0, *accumulate([1] * k)] if borders[-1] <= borders[-2] else borders
    return tuple(
        HybridStage(a, b, tuple(sorted(order[x:y])))
        for (a, b), (x, y) in zip(pairwise(ends), pairwise(borders), strict=True)
    )


@pytest.mark.parametrize("seed", range(150))
def test_equals_the_definition(seed):
    rng = random.Random(seed)
    count, each = rng.choice([(1, 4), (4, 1), (2, 2), (2, 3), (3, 2)])
    network = (rng.uniform(1e9, 1e11), rng.uniform(2e8, 5e9), rng.choice([0.0, 1e-4]))
    memory = rng.choice([10**18, 10**9])
    cluster = servers(count, each, *network, memory=memory)
    chain = random_chain(rng, rng.randint(2, 9))
    if seed % 2:
        chain = on_unequal(rng, chain, count * each)
    warmup, mode, copies = rng.choice(["early", "late"]), rng.choice(["end", "overlap"]), rng.choice([0, 1, 3])
    problem = Problem(chain, cluster, rng.choice([1, 2, 3, 7, 16]), warmup, mode, copies)
    for _ in range(3):
        stages = random_stages(rng, len(chain), count * each)
        check(HybridPlan("m", stages, 1), len(chain), count * each)
        exact = tuple(Fraction(value) for value in network)
        slow = slow_event_time(chain, stages, problem.micro_batches, warmup, mode, (each, *exact), copies, memory)
        assert event_time(problem, stages) == pytest.approx(float(slow), rel=1e-12)


def test_by_hand():
    """Two stages of 1 s forward and 2 s backward, a link of 1 s each way, two micro-batches:

    stage 0   F0 F1  .  . .  . B0 B0 B1 B1  = 1 + 1 + (F0, link, F0, B0, B0, link = 6 s) ..
    """
    chain = Chain("m", 1, (Layer("a", 1, 2, cut=1), Layer("b", 1, 2)))
    problem = Problem(chain, servers(2, 1, 1, 1, 0), 2)
    plan = (HybridStage(0, 1, (0,)), HybridStage(1, 2, (1,)))
    # stage 1: F0 2-3, B0 3-5, F1 5-6, B1 6-8; gradients arrive at 6 and 9; stage 0: B0 6-8, B1 9-11
    warm = replace(problem, warmup="early")
    assert event_time(warm, plan) == 11
    assert event_time(problem, plan, limit=11) == inf
    assert event_time(problem, plan, limit=11.5) == 11


def test_recompute_runs_before_the_gradient_arrives():
    chain = Chain("m", 1, (Layer("a", 1, 2, saved=10, cut=1), Layer("b", 1, 2, saved=10)))
    problem = Problem(chain, servers(2, 1, 1, 1, 0, memory=12), 1, copies=0)
    stages = (HybridStage(0, 1, (0,), recompute=True), HybridStage(1, 2, (1,), recompute=True))
    # stage 1: F 2-3, R 3-4, B 4-6; stage 0: R 1-2, B 7-9
    assert event_time(problem, stages) == 9
    assert problem.stage(1, 2, (1,), True).held(3) == 3 * 1 + 10


def test_how_many_micro_batches_memory_lets_wait():
    chain = Chain("m", 2, (Layer("a", 1, 2, 5, 10), Layer("b", 1, 2, 5, 10)))
    problem = Problem(chain, servers(1, 2, 1, 1, 0, memory=75), 8, copies=2)
    cost, half = problem.stage(0, 2, (0,)), problem.stage(0, 2, (0, 1))
    assert cost.held(2) <= cost.room < cost.held(3)
    assert half.held(5) <= half.room < half.held(6)
    assert problem.stage(0, 2, (0,), True).kept == 0  # the first stage keeps nothing of its own


@pytest.mark.parametrize("seed", range(40))
def test_a_limit_is_met_or_exceeded(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, 8)
    problem = Problem(chain, servers(2, 3, 1e10, rng.uniform(2e8, 5e9), 0), rng.choice([2, 16, 128]), "late")
    stages = random_stages(rng, 8, 6)
    seconds = event_time(problem, stages)
    assert event_time(problem, stages, limit=seconds * 1.001) == seconds
    assert event_time(problem, stages, limit=seconds * 0.999) == inf
    assert event_time(problem, stages, limit=seconds / 3) == inf
