"""The planner against all plans there are, on problems small enough to go through them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, product
from math import inf

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.cluster.published_clusters import k80s
from fxpipe.ir.plan.hybrid_plan import HybridStage, check
from fxpipe.ir.plan.layer_chain import Chain, Layer, scaled
from fxpipe.planning.hybrid.event_time import Problem, event_time, fits
from fxpipe.planning.hybrid.exact import lagrangian_bound as dual
from fxpipe.planning.hybrid.exact.device_symmetry import runs
from fxpipe.planning.hybrid.exact.optimal_plan import optimal
from fxpipe.planning.hybrid.exact.relaxed_cluster import Relaxed, rates
from fxpipe.planning.hybrid.exact.relaxed_ways import RelaxedWays
from fxpipe.planning.hybrid.plan_request import Answer, Request
from tests.helpers.marks import mostly_slow
from tests.planning.hybrid.test_event_time import random_chain, servers, slow_event_time

LAYOUTS = [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (1, 5), (5, 1)]  # servers, and devices in each


def all_stages(layers: int, devices: int, recompute: tuple[bool, ...] = (False,)) -> Iterator[tuple[HybridStage, ...]]:
    """Every plan, by name of devices: nothing is taken to be symmetric."""
    for k in range(1, min(layers, devices) + 1):
        for homes in product(range(-1, k), repeat=devices):
            groups = [tuple(d for d, home in enumerate(homes) if home == s) for s in range(k)]
            if not all(groups):
                continue
            for inner in combinations(range(1, layers), k - 1):
                ends = (0, *inner, layers)
                for again in product(recompute, repeat=k):
                    yield tuple(map(HybridStage, ends, ends[1:], groups, again))


def instance(seed: int, layers: int, devices: int):
    rng = random.Random(seed)
    count, each = rng.choice([layout for layout in LAYOUTS if layout[0] * layout[1] <= devices])
    network = (rng.uniform(1e10, 1e11), 10 ** rng.uniform(8, 10), rng.choice([0.0, 1e-4, 2e-3]))
    chain = random_chain(rng, rng.randint(1, layers))
    copies = rng.choice([0, 1, 3])
    need = max(copies * layer.parameters + layer.saved for layer in chain.layers)
    memory = rng.choice([10**18, int(need * rng.uniform(0.8, 4)) + 1, int(need * rng.uniform(2, 12)) + 1])
    cluster = servers(count, each, *network, memory=memory)
    problem = Problem(
        chain,
        cluster,
        rng.choice([1, 2, 3, 4, 6, 9]),
        rng.choice(["early", "late"]),
        rng.choice(["end", "overlap"]),
        copies,
        memory < 10**18,
    )
    return problem, (each, *map(Fraction, network)), memory


def ask(chain: Chain, cluster: Cluster, batch: int, **choices) -> Answer:
    return optimal(Request((chain,), cluster, batch, **{"copies": 2, **choices}))


def plan_for(problem: Problem, **choices) -> Answer:
    fixed = {
        "micro_batches": problem.micro_batches,
        "warmup": problem.warmup,
        "all_reduce": problem.all_reduce,
        "copies": problem.copies,
        "capped": problem.capped,
        "recompute": False,
    }
    batch = problem.chain.batch * problem.micro_batches
    return ask(problem.chain, problem.cluster, batch, **{**fixed, **choices})


def compare(problem: Problem, network: tuple[int | Fraction, ...], memory: int) -> None:
    """The plan found is as fast as the fastest of all plans; its time is that of a second simulation."""
    n, g = len(problem.chain), len(problem.cluster.devices)
    best = inf
    for stages in all_stages(n, g):
        best = min(best, event_time(problem, stages, best))
    if best == inf:
        with pytest.raises(PlanError, match="no plan found that fits in memory"):
            plan_for(problem)
        return
    found = plan_for(problem)
    check(found.plan, n, g)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.certificate.proven, found
    assert event_time(problem, found.plan.stages) == pytest.approx(found.seconds, rel=1e-12)
    m = problem.micro_batches
    fixed = (m, problem.warmup, problem.all_reduce, network, problem.copies, memory if problem.capped else inf)
    slow = slow_event_time(problem.chain, found.plan.stages, *fixed)
    assert found.seconds == pytest.approx(float(slow), rel=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    compare(*instance(seed, layers=6, devices=4))


def odd_cluster(rng: random.Random) -> Cluster:
    """Links instead of switches, switches on the way to others, devices that are not alike or not in order."""
    if rng.random() < 0.3:
        boards = k80s(1)
        return replace(boards, devices=tuple(rng.sample(boards.devices, 4)))
    memory = [rng.choice([3 * 10**8, 10**9]) for _ in range(4)]
    homes = rng.choice(["aabb", "abab", "aaab", "abcc"])
    devices = tuple(Device(f"g{i}", memory[i], 1e12, 1e12, homes[i]) for i in range(4))
    pairs = combinations_with_replacement(sorted(set(homes)), 2)
    links = tuple(Link(pair, 10 ** rng.uniform(8, 10), rng.choice([0.0, 1e-4])) for pair in pairs)
    own = (Link(("g0", "g3"), 5e9, 0.0),) if rng.random() < 0.3 else ()
    return Cluster(devices, links + own)


@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force_on_odd_clusters(seed):
    rng = random.Random(seed)
    chain, cluster, m = random_chain(rng, rng.randint(2, 5)), odd_cluster(rng), rng.choice([1, 3, 8])
    problem = Problem(chain, cluster, m, rng.choice(["early", "late"]), rng.choice(["end", "overlap"]))
    best = min(event_time(problem, stages) for stages in all_stages(len(chain), 4))
    if best == inf:
        with pytest.raises(PlanError):
            plan_for(problem)
        return
    found = plan_for(problem)
    assert found.certificate.proven
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert event_time(problem, found.plan.stages) == pytest.approx(found.seconds, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_equals_brute_force_on_larger_problems(seed):
    compare(*instance(seed, layers=8, devices=5))


@pytest.mark.parametrize("seed", range(15))
def test_chooses_micro_batches_warmup_and_recompute(seed):
    problem, _, _ = instance(seed + 500, layers=4, devices=3)
    chain, cluster = problem.chain, problem.cluster
    batch, best = 6, inf
    for m, warmup in product((1, 2, 3, 6), ("early", "late")):
        own = Problem(scaled(chain, batch / m), cluster, m, warmup, problem.all_reduce, problem.copies, problem.capped)
        for stages in all_stages(len(chain), len(cluster.devices), recompute=(False, True)):
            best = min(best, event_time(own, stages, best))
    choices = {"all_reduce": problem.all_reduce, "copies": problem.copies, "capped": problem.capped}
    if best == inf:
        with pytest.raises(PlanError):
            ask(chain, cluster, batch, **choices)
        return
    found = ask(chain, cluster, batch, **choices)
    assert found.certificate.proven
    assert found.seconds == pytest.approx(best, rel=1e-9)
    plan = found.plan
    own = scaled(chain, batch / plan.micro_batches)
    own = Problem(own, cluster, plan.micro_batches, plan.warmup, problem.all_reduce, problem.copies, problem.capped)
    assert event_time(own, plan.stages) == found.seconds


def most_held(problem: Problem, stages: tuple[HybridStage, ...], sharding: str) -> float:
    """The share of its memory that the fullest device uses, from the definition: with "zero1" each of r replicas has an
    r-th of what there is beside parameters and gradients; with "zero3" an r-th of all, and besides the parameters and
    gradients of the largest layer."""
    chain, m, n, found = problem.chain, problem.micro_batches, len(stages), 0.0
    for s, stage in enumerate(stages):
        own, r = chain.layers[stage.first : stage.end], len(stage.devices)
        share = 1 / r if chain.ideal_shares else -(-chain.samples // r) / chain.samples
        state = max(problem.copies - 2, 0) / (r if sharding == "zero1" else 1)
        fixed = (min(problem.copies, 2) + state) * sum(layer.parameters for layer in own)
        if sharding == "zero3" and r > 1:
            fixed = problem.copies * sum(layer.parameters for layer in own) / r
            fixed += min(problem.copies, 2) * max(layer.parameters for layer in own)
        waiting = min(m, n - s if problem.warmup == "early" else 2 * (n - s) - 1)
        saved = sum(layer.saved for layer in own) * share
        taken = chain.layers[stage.first - 1].cut * share if stage.first else 0.0
        kept = waiting * taken + saved if stage.recompute else waiting * saved
        room = min(problem.cluster.devices[device].memory for device in stage.devices)
        found = max(found, (fixed + kept) / room)
    return found


def compare_sharded(seed: int) -> str:
    """On a random problem whose memory is tight, the plan is the fastest of all that fit if the optimizer's state is
    sharded, and "auto" shards it only if the plan would not fit otherwise. Returns the plan's sharding, "" without."""
    rng = random.Random(seed)
    problem, _, _ = instance(seed, layers=5, devices=4)
    asked, recompute = rng.choice(["zero1", "auto"]), rng.choice([None, None, False, True])
    copies, chain, devices = rng.choice([3, 4, 8]), problem.chain, problem.cluster.devices
    total = sum(copies * layer.parameters + layer.saved for layer in chain.layers)
    memory = [int(total * rng.uniform(0.2, 1.0)) + 1] * len(devices)
    memory[-1] = int(memory[-1] * rng.choice([1, 1, 1.5]))
    cluster = replace(
        problem.cluster, devices=tuple(replace(one, memory=room) for one, room in zip(devices, memory, strict=True))
    )
    problem = replace(problem, cluster=cluster, copies=copies, capped=True, optimizer_sharding=asked)
    roomy = replace(problem, capped=False)
    choices = (False, True) if recompute is None else (recompute,)
    best = inf
    for stages in all_stages(len(chain), len(devices), choices):
        if most_held(problem, stages, "zero1") <= 1:
            best = min(best, event_time(roomy, stages, best))
    given = {"recompute": recompute, "optimizer_sharding": asked}
    if best == inf:
        with pytest.raises(PlanError, match="no plan found that fits in memory"):
            plan_for(problem, **given)
        return ""
    found = plan_for(problem, **given)
    check(found.plan, len(chain), len(devices))
    assert found.certificate.proven
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert event_time(roomy, found.plan.stages) == pytest.approx(found.seconds, rel=1e-12)
    assert most_held(problem, found.plan.stages, found.plan.optimizer_sharding) <= 1
    fits_whole = most_held(problem, found.plan.stages, "none") <= 1
    assert found.plan.optimizer_sharding == ("none" if asked == "auto" and fits_whole else "zero1")
    return found.plan.optimizer_sharding


@pytest.mark.parametrize("seed", range(6))
def test_sharded_optimizer_state_equals_brute_force(seed):
    compare_sharded(seed)


def tight(seed: int) -> Problem:
    """A random problem in which large parameters are gathered over a fast network, and few micro-batches make
    pipelines slow; memory is short of them."""
    rng = random.Random(seed)
    devices, samples, copies = rng.choice([2, 3]), rng.choice([2, 4, 6]), rng.choice([2, 3, 4, 8])
    layers = tuple(
        Layer(
            str(at), rng.uniform(1e-3, 4e-3), rng.uniform(1e-3, 8e-3), rng.choice([1e8, 1e8, 2e8, 0]),
            rng.uniform(1e5, 1e6), rng.uniform(1e5, 1e7),
        )
        for at in range(rng.randint(4, 6))
    )  # fmt: skip
    total = sum(copies * layer.parameters + layer.saved for layer in layers)
    memory = int(total * rng.uniform(0.36, 0.75)) + 1
    cluster = servers(1, devices, 10 ** rng.uniform(11.5, 13), 1e9, rng.choice([0, 1e-5]), memory=memory)
    given = rng.choice([1, 1, 2, 4]), rng.choice(["early", "late"]), rng.choice(["end", "overlap"])
    return Problem(Chain("m", samples, layers), cluster, *given, copies, True, rng.choice(["zero3", "auto"]))


@pytest.mark.parametrize("seed", range(12))
def test_sharded_parameters_equal_brute_force(seed):
    """Also "auto": the fastest plan with any sharding, and of equally fast ones the least sharding."""
    problem, recompute = tight(seed), random.Random(-seed).choice([None, None, False, True])
    asked, choices = problem.optimizer_sharding, (False, True) if recompute is None else (recompute,)
    found: tuple[float, str] = (inf, "")
    for sharding in ("none", "zero1", "zero3") if asked == "auto" else (asked,):
        roomy = replace(problem, capped=False, optimizer_sharding=sharding)
        for stages in all_stages(len(problem.chain), len(problem.cluster.devices), choices):
            if most_held(problem, stages, sharding) <= 1:
                seconds = event_time(roomy, stages, found[0])
                found = min(found, (seconds, sharding)) if seconds < found[0] * (1 - 1e-12) else found
    best, sharding = found
    given = {"recompute": recompute, "optimizer_sharding": asked}
    if best == inf:
        with pytest.raises(PlanError, match="no plan found that fits in memory"):
            plan_for(problem, **given)
        return
    made = plan_for(problem, **given)
    check(made.plan, len(problem.chain), len(problem.cluster.devices))
    assert made.certificate.proven
    assert made.certificate.bound <= best * (1 + 1e-9)
    assert made.seconds == pytest.approx(best, rel=1e-9)
    assert made.plan.optimizer_sharding == sharding
    assert most_held(problem, made.plan.stages, sharding) <= 1


def test_no_bound_on_sharded_parameters_is_above_the_optimum():
    """The relaxed costs of stages are no more than those of any placement, in seconds and in bytes."""
    for seed in range(8):
        problem = replace(tight(seed), optimizer_sharding="zero3")
        devices, layers = problem.cluster.devices, len(problem.chain)
        relaxed = Relaxed(problem, rates(problem, runs(problem.cluster, problem.kinds)), None)
        forward, backward = relaxed.times(len(devices))
        states, tails = relaxed.states(len(devices)), relaxed.tails(len(devices))
        for stages in all_stages(layers, len(devices)):
            for stage in stages:
                cost = problem.stage(stage.first, stage.end, stage.devices)
                at = stage.end, stage.first, len(stage.devices)
                assert forward[at] <= cost.forward * (1 + 1e-12)
                assert backward[at] <= cost.backward * (1 + 1e-12)
                assert states[at] <= cost.fixed * (1 + 1e-12)
                assert tails[at] <= cost.tail
                assert relaxed.held(stage.first, stage.end) <= len(stage.devices) or not fits(problem, stages)


def test_recomputes_only_where_it_must():
    """One stage holds 2 x (5 + 5) and 11 / 2 bytes; the first of two 2 x 5 and 2 x 10, or only 10 if it recomputes."""
    chain = Chain("m", 1, (Layer("a", 1, 2, 5, saved=10, cut=1), Layer("b", 1, 2, 5, saved=1)))
    cluster = servers(2, 1, 1e9, 1e9, 0, memory=22)
    found = ask(chain, cluster, 4, micro_batches=4)
    assert [stage.recompute for stage in found.plan.stages] == [True, False]
    assert all(stage.recompute for stage in ask(chain, cluster, 4, micro_batches=4, recompute=True).plan.stages)
    with pytest.raises(PlanError, match="allow recompute"):
        ask(chain, cluster, 4, micro_batches=4, recompute=False)


@pytest.mark.parametrize("seed", mostly_slow(range(25), range(5).__contains__))
def test_larger_plans_are_legal_and_no_worse_than_simple_ones(seed):
    """More than brute force can check: few seconds are given, and what comes out must be sound all the same."""
    rng = random.Random(seed)
    count, each = rng.choice([(8, 1), (2, 4), (4, 2), (1, 6), (3, 3), (6, 5)])
    memory = rng.choice([10**18, 10**9, 4 * 10**8])
    cluster = servers(count, each, 10 ** rng.uniform(9.5, 11), 10 ** rng.uniform(8, 9.5), rng.choice([0, 1e-4]), memory)
    chain, m = random_chain(rng, rng.randint(5, 24)), rng.choice([2, 8, 24])
    n, g = len(chain), count * each
    problem = Problem(chain, cluster, m, rng.choice(["early", "late"]), rng.choice(["end", "overlap"]), 2)
    simple = [(HybridStage(0, n, tuple(range(g))),)]
    if g <= n:
        cuts = [n * s // g for s in range(g + 1)]
        simple.append(tuple(HybridStage(a, b, (s,)) for s, (a, b) in enumerate(pairwise(cuts))))
    try:
        found = plan_for(problem, seconds=1.5)
    except PlanError:
        assert not any(fits(problem, stages) for stages in simple)
        return
    check(found.plan, n, g)
    assert fits(problem, found.plan.stages)
    assert event_time(problem, found.plan.stages) == pytest.approx(found.seconds, rel=1e-12)
    assert 0 < found.certificate.bound <= found.seconds
    for stages in simple:
        assert found.seconds <= event_time(problem, stages)


@pytest.mark.parametrize("seed", range(30))
def test_devices_with_a_price_give_a_bound(seed):
    problem, _, _ = instance(seed, layers=6, devices=4)
    g = len(problem.cluster.devices)
    groups = runs(problem.cluster)
    best = min(event_time(problem, stages) for stages in all_stages(len(problem.chain), g))
    bound, plans = dual.search(
        RelaxedWays((Relaxed(problem, rates(problem, groups), False),), (1,), g), 0.0, 10.0, steps=20
    )
    assert bound <= min(best, 10.0) * (1 + 1e-9)
    assert all(sum(r for _, r, _ in sizes) <= g for sizes in plans)


def test_runs():
    assert runs(servers(1, 4, 1e9, 1e9, 0)) == ((0, 1, 2, 3),)
    assert runs(servers(4, 1, 1e9, 1e9, 0)) == ((0, 1, 2, 3),)
    assert runs(servers(2, 2, 1e9, 1e9, 0)) == ((0, 1), (2, 3))
    linked = Cluster.of(["cpu:0", "cpu:1"])
    assert runs(linked) == ((0, 1),)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "each"), [(16, 1), (2, 8)])
def test_48_layers_on_16_devices(count, each):
    chain = random_chain(random.Random(0), 48)
    found = ask(chain, servers(count, each, 1e11, 3e9, 5e-6), 8 * 32, micro_batches=32, seconds=60)
    assert found.certificate.proven


@pytest.mark.long
def test_100_layers_on_1024_devices():
    chain = random_chain(random.Random(0), 100)
    found = ask(chain, servers(128, 8, 1e11, 1.2e10, 5e-6), 8 * 64, micro_batches=64, warmup="late", seconds=50)
    check(found.plan, 100, 1024)
    assert found.certificate.gap < 0.25
    assert found.certificate.seconds < 60


GOOD = Chain("m", 1, (Layer("a", 1, 2, 10**6, 10**6, 10**6), Layer("b", 1, 2, 10**6, 10**6)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chain": Chain("m", 1, ())}, "m has no layers"),
        ({"chain": Chain("m", 1, (Layer("a", -1, 2),))}, "layer 'a' of m has a cost that cannot be"),
        ({"cluster": Cluster(())}, "the cluster has no devices"),
        ({"batch": 0}, "batch_size is 0; a step has at least one sample"),
        ({"micro_batches": 0}, "0 micro-batches"),
        ({"warmup": "soon"}, "no warm-up 'soon'"),
        ({"all_reduce": "never"}, "no all-reduce 'never'"),
        ({"seconds": 0}, "0 seconds to search"),
        (
            {"cluster": servers(2, 1, 1e9, 1e9, 0, memory=10**6)},
            "layer 'a' alone 2 MB, and the largest of 2 devices has 1 MB",
        ),
    ],
)
def test_says_what_is_wrong(change, message):
    task = {"chain": GOOD, "cluster": servers(2, 1, 1e9, 1e9, 0), "batch": 2, "micro_batches": 2, "seconds": 5}
    with pytest.raises(PlanError, match=message):
        ask(**{**task, **change})


def test_prints():
    found = ask(GOOD, servers(2, 1, 1e9, 1e9, 0), 8, micro_batches=4, warmup="early")
    assert str(found.plan).startswith("m: 1 stage DP, 4 micro-batches, early warm-up, all-reduce at the end\n")
    assert str(found.certificate).startswith("proven optimal: no plan takes less than 24 s")
    ideal = replace(GOOD, ideal_shares=True)
    found = ask(ideal, servers(2, 1, 1e9, 1e9, 0), 4, micro_batches=4, warmup="early")
    assert str(found.plan).startswith("m: 1 stage DP, 4 micro-batches, early warm-up, all-reduce at the end, ideal sh")
    assert str(found.certificate).startswith("proven optimal, with ideal shares: no plan takes less than 12 s")


def test_one_sample_is_not_shared():
    """Two replicas would be no faster than one, so layers are: 4 x 3 s, and 3 s and the transfers before."""
    found = ask(GOOD, servers(2, 1, 1e9, 1e9, 0), 4, micro_batches=4, warmup="early")
    assert [stage.devices for stage in found.plan.stages] == [(0,), (1,)]
    assert found.seconds == pytest.approx(15.004)
    assert found.certificate.proven
