"""How long one training step of a hybrid plan takes, by following its events. A search calls this very often.

Each stage is one resource: its replicas move in lock-step, so it takes as long as its slowest replica. Replicas share
whole samples (`fxpipe.ir.replica_shares`), or, if the chain says so, have ideal shares. Memory is counted for the
largest share. A stage runs K forwards, then backwards and forwards in turns until the forwards run out, then the
backwards that are left. Between neighbouring stages there is one resource for each direction, which carries one
micro-batch at a time:

    round        0                        1
    stage 0      F0 F1 F2 F3          B0  F4      B1
    link 0 > 1      >0 >1 >2 >3      <0       >4  <1
    stage 1            F0 F1  B0          F2  B1

Rounds are also the order of evaluation. In round t every stage, from first to last, does the forwards before its
backward of micro-batch t; then every stage, from last to first, does that backward. So all that a task waits for is
known when the task is reached, and one walk gives all times. At the end replicas add up their gradients; the step ends
with the last all-reduce.

`Problem` remembers all that depends on one stage alone, or on one pair of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import NamedTuple

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.network import Rate, all_gather, all_reduce, split_concat
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, warmup_of
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.ir.plan.model_states import model_states
from fxpipe.ir.replica_shares import dealt, largest_share

Devices = tuple[int, ...]
Replica = tuple[Chain, float]  # the costs on its kind of device, and its share of a micro-batch


class StageTimes(NamedTuple):
    """What a stage costs by itself: seconds for a micro-batch, and bytes on each device.

    - `forward`, `again`, `backward`: seconds; `again` is the recomputation, 0 without.
    - `tail`: seconds of the all-reduce after the last backward.
    - `fixed`: bytes of parameters and their copies.
    - `kept`: bytes for each micro-batch from its forward to its backward.
    - `once`: further bytes while a backward runs.
    - `room`: bytes of memory that there are.
    """

    forward: float
    again: float
    backward: float
    tail: float
    fixed: float
    kept: float
    once: float
    room: float

    def held(self, warmup: int) -> float:
        """The most bytes that a device has in use, with `warmup` micro-batches alive."""
        return self.fixed + warmup * self.kept + self.once


@dataclass(frozen=True)
class Problem:
    """What plans are for. Costs of stages are remembered; `dataclasses.replace` starts with none.

    - `chain`: the layers, with costs at the size of a micro-batch, for each kind of device.
    - `cluster`: the devices.
    - `micro_batches`: their number in a step.
    - `warmup`, `all_reduce`: as in `HybridPlan`.
    - `copies`: bytes in memory for each byte of parameters: 2 with the gradient, more with the optimizer's state.
    - `capped`: whether plans must fit in memory.
    - `optimizer_sharding`: as in `HybridPlan`, or "auto": "zero1" for plans that do not fit in memory otherwise.

    Replicas that share out the optimizer's state need not all-reduce their gradients: a reduce-scatter gives each the
    sums for its share, and an all-gather the parameters that the others have updated. In a ring these two take as long
    as the all-reduce, which is a reduce-scatter and an all-gather (ZeRO, section 7.2.1). So they are counted as one.

    With "zero3" each forward and each backward of a micro-batch all-gathers the parameters of the stage, layer by
    layer, and each backward reduce-scatters their gradients (section 7.2.2, there once a step). Computing waits
    meanwhile: nothing is gathered ahead. Nothing is left to add up at the end.
    """

    chain: Chain
    cluster: Cluster
    micro_batches: int
    warmup: str = "early"
    all_reduce: str = "end"
    copies: float = 2
    capped: bool = True
    optimizer_sharding: str = "none"
    _stages: dict[tuple[int, int, Devices, bool], StageTimes] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _between: dict[tuple[Devices, Devices], Rate] = field(default_factory=dict, init=False, compare=False, repr=False)
    _replicas: dict[Devices, tuple[Replica, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _shares: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    _all_reduce: dict[Devices, Rate] = field(default_factory=dict, init=False, compare=False, repr=False)

    def stage(self, first: int, end: int, devices: Devices, recompute: bool = False) -> StageTimes:
        """The cost of one stage, remembered."""
        key = (first, end, devices, recompute)
        times = self._stages.get(key)
        if times is None:
            times = self._stages[key] = _stage_times(self, *key)
        return times

    def rate(self, senders: Devices, receivers: Devices) -> Rate:
        """The rate from one stage to the next, remembered. Going back takes `rate(receivers, senders)`."""
        key = (senders, receivers)
        rate = self._between.get(key)
        if rate is None:
            rate = self._between[key] = split_concat(self.cluster, senders, receivers, self.chain.samples)
        return rate

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each device of the cluster, as `Chain.kind_of` has it; of kinds with the same times the first."""
        found = [self.chain.kind_of(label) for label in self.cluster.labels]
        first: dict[tuple[Layer, ...], str] = {}
        same = {kind: first.setdefault(self.chain.on(kind).layers, kind) for kind in dict.fromkeys(found)}
        return tuple(same[kind] for kind in found)

    @cached_property
    def by_kind(self) -> dict[str, Chain]:
        """The costs on each kind of device that the cluster has."""
        return {kind: self.chain.on(kind) for kind in dict.fromkeys(self.kinds)}

    @cached_property
    def fast(self) -> Chain:
        """The least costs of each layer on any device."""
        return _extreme(self, min)

    @cached_property
    def slow(self) -> Chain:
        """The greatest costs of each layer on any device."""
        return _extreme(self, max)

    @cached_property
    def capacity(self) -> float:
        """How many of the fastest devices the cluster's devices are worth at most. No plan runs a micro-batch through
        all layers in less than the seconds of `fast` divided by it: a stage that takes t seconds runs on each of its
        devices at most t / (seconds of `fast`) x `_speed` of the samples, and all samples are run."""
        if len(self.by_kind) == 1:
            return len(self.kinds)
        speeds = {kind: _speed(self.fast, chain) for kind, chain in self.by_kind.items()}
        return sum(speeds[kind] for kind in self.kinds)

    def replicas(self, devices: Devices) -> tuple[Replica, ...]:
        """Of each kind of device the costs, and the largest share that one of `devices` has, remembered. A device
        without samples counts as none."""
        found = self._replicas.get(devices)
        if found is None:
            found = self._replicas[devices] = _replicas(self, devices)
        return found

    def share(self, replicas: int) -> float:
        """The largest share of a micro-batch that a replica has, remembered."""
        share = self._shares.get(replicas)
        if share is None:
            share = self._shares[replicas] = largest_share(self.chain.samples, replicas)
        return share

    def fixed(self, first: int, end: int, replicas: int) -> float:
        """Bytes that each device of a stage holds whatever it computes."""
        sharding = "zero1" if self.optimizer_sharding == "auto" else self.optimizer_sharding
        return sum(model_states(self.chain, first, end, replicas, self.copies, sharding))

    def gather(self, first: int, end: int, devices: Devices) -> float:
        """Seconds in which the replicas of a stage all-gather its parameters, layer by layer, or reduce-scatter their
        gradients; 0 if each has all of them."""
        if self.optimizer_sharding != "zero3" or len(devices) == 1:
            return 0.0
        rate = all_gather(self.ring(devices))
        return sum(rate.seconds(layer.parameters) for layer in self.chain.layers[first:end])

    def ring(self, devices: Devices) -> Rate:
        """The rate of an all-reduce, remembered."""
        rate = self._all_reduce.get(devices)
        if rate is None:
            rate = self._all_reduce[devices] = all_reduce(self.cluster, devices)
        return rate


Placed = tuple[Problem, Devices]  # the problem of a stage, and the positions of its replicas in the cluster of that


def _extreme(problem: Problem, choose: Callable[[Iterable[float]], float]) -> Chain:
    """The chain with the chosen one of each layer's times on all kinds of devices."""
    chains = list(problem.by_kind.values())
    if len(chains) == 1:
        return chains[0]
    layers = (
        replace(same[0], forward=choose(e.forward for e in same), backward=choose(e.backward for e in same))
        for same in zip(*(chain.layers for chain in chains), strict=True)
    )
    return replace(chains[0], layers=tuple(layers))


def _speed(fast: Chain, chain: Chain) -> float:
    """The speed of a kind of device, for the layer that suits it best: at most 1, that of the fastest."""
    pairs = ((a.forward + a.backward, b.forward + b.backward) for a, b in zip(fast.layers, chain.layers, strict=True))
    return max((least / own for least, own in pairs if own), default=1.0)


def _replicas(problem: Problem, devices: Devices) -> tuple[Replica, ...]:
    samples, r = problem.chain.samples, len(devices)
    if len(problem.by_kind) == 1:
        (chain,) = problem.by_kind.values()
        return ((chain, problem.share(r)),)
    shares = [1 / r] * r if samples is None else [count / samples for count in dealt(samples, r)]
    largest: dict[str, float] = {}
    for device, share in zip(devices, shares, strict=True):
        kind = problem.kinds[device]
        largest[kind] = max(share, largest.get(kind, 0.0))
    return tuple((problem.by_kind[kind], share) for kind, share in largest.items() if share)


def _stage_times(problem: Problem, first: int, end: int, devices: Devices, recompute: bool) -> StageTimes:
    chain, share, replicas = problem.chain, problem.share(len(devices)), problem.replicas(devices)
    forward = max((own.forwards[end] - own.forwards[first]) * part for own, part in replicas)
    backward = max((own.backwards[end] - own.backwards[first]) * part for own, part in replicas)
    gather = problem.gather(first, end, devices)
    forward, backward = forward + gather, backward + 2 * gather
    saved = (chain.saved[end] - chain.saved[first]) * share
    taken = chain.cuts[first] * share
    return StageTimes(
        forward,
        forward if recompute else 0.0,
        backward,
        _tail(problem, first, end, devices),
        fixed=problem.fixed(first, end, len(devices)),
        kept=taken if recompute else saved,
        once=saved if recompute else 0.0,
        room=min(problem.cluster.devices[device].memory for device in devices) if problem.capped else inf,
    )


def _tail(problem: Problem, first: int, end: int, devices: Devices) -> float:
    """Seconds from the end of the last backward to the end of the all-reduce."""
    if len(devices) == 1 or problem.optimizer_sharding == "zero3":
        return 0.0
    rate, chain, replicas = problem.ring(devices), problem.chain, problem.replicas(devices)
    if problem.all_reduce == "end":
        return rate.seconds(chain.parameters[end] - chain.parameters[first])
    free = ready = 0.0  # from the start of the last backward
    for at in range(end - 1, first - 1, -1):
        ready = max((own.backwards[end] - own.backwards[at]) * share for own, share in replicas)
        free = max(free, ready) + rate.seconds(chain.layers[at].parameters)
    return free - ready


def least_work(problem: Problem) -> float:
    """Seconds that no step takes less than: all of its work, shared by all devices without a loss."""
    return problem.micro_batches * (problem.fast.forwards[-1] + problem.fast.backwards[-1]) / problem.capacity


def least_work_of(problems: Sequence[Problem], degrees: Sequence[int], devices: int) -> float:
    """As `least_work`, where each stage has one of several problems, on groups of so many devices each."""
    if len(problems) == 1:
        return least_work(problems[0])
    every = [
        [degree * (layer.forward + layer.backward) for layer in problem.fast.layers]
        for degree, problem in zip(degrees, problems, strict=True)
    ]
    least: float = sum(min(times) for times in zip(*every, strict=True))
    return problems[0].micro_batches * least / devices


def plan_of(problem: Problem, stages: tuple[HybridStage, ...], places: Sequence[Placed] = ()) -> HybridPlan:
    """The plan of these stages; for "auto" with the least sharding with which they fit. `places`: the problem of each
    stage, if not all have `problem`, and the positions of its replicas there."""
    chain, m, sharding = problem.chain, problem.micro_batches, problem.optimizer_sharding
    if sharding == "auto":
        own = places or [(problem, stage.devices) for stage in stages]
        whole = [(replace(one, optimizer_sharding="none"), devices) for one, devices in own]
        sharding = "none" if fits(problem, stages, whole) else "zero1"
    return HybridPlan(
        chain.model, stages, m, problem.warmup, problem.all_reduce, chain.samples, optimizer_sharding=sharding
    )


def fits(problem: Problem, stages: Sequence[HybridStage], places: Sequence[Placed] = ()) -> bool:
    """Whether every stage fits in the memory of its devices. `places` is as in `plan_of`."""
    own = places or [(problem, stage.devices) for stage in stages]
    for s, ((one, devices), stage) in enumerate(zip(own, stages, strict=True)):
        cost = one.stage(stage.first, stage.end, devices, stage.recompute)
        if cost.held(warmup_of(problem.warmup, s, len(stages), problem.micro_batches)) > cost.room:
            return False
    return True


def event_time(problem: Problem, stages: Sequence[HybridStage], limit: float = inf) -> float:
    """The seconds of one step; inf if a stage does not fit in memory, or if the step takes `limit` or more.

    Stages must be in order and have devices of their own, see `fxpipe.ir.plan.hybrid_plan.check`.
    """
    n, m = len(stages), problem.micro_batches
    costs = [problem.stage(e.first, e.end, e.devices, e.recompute) for e in stages]
    ahead = [warmup_of(problem.warmup, s, n, m) for s in range(n)]
    if problem.capped and any(cost.held(k) > cost.room for cost, k in zip(costs, ahead, strict=True)):
        return inf
    return step_time(costs, ahead, *_links(problem, stages), m, limit)


def step_time(
    costs: Sequence[StageTimes], ahead: Sequence[int], down: Sequence[float], up: Sequence[float], m: int, limit: float
) -> float:
    """The seconds of a step whose stages fit in memory; inf if it takes `limit` or more.

    For each stage: `costs`, and `ahead`, the forwards before its first backward. `down` has the seconds of each
    transfer to the next stage, `up` those of each gradient to the stage before. `m` is the number of micro-batches.
    """
    if len(costs) == 1:
        seconds = m * (costs[0].forward + costs[0].again + costs[0].backward) + costs[0].tail
        return seconds if seconds < limit else inf
    ends = _last_backwards(costs, ahead, down, up, m, limit)
    return max(end + cost.tail for end, cost in zip(ends, costs, strict=True)) if ends else inf


def _last_backwards(
    costs: Sequence[StageTimes], ahead: Sequence[int], down: Sequence[float], up: Sequence[float], m: int, limit: float
) -> list[float]:
    """When the last backward of each stage ends; an empty list if the step takes `limit` or more.

    After some rounds the times repeat with a period of a few rounds. From then on whole periods are skipped, and their
    time is added at the end.
    """
    n, last = len(costs), len(costs) - 1
    forward = [cost.forward for cost in costs]
    again, backward = [cost.again for cost in costs], [cost.backward for cost in costs]
    turn = [cost.forward + cost.again + cost.backward for cost in costs]
    deadline = [limit - cost.tail for cost in costs]
    free, down_free, up_free = [0.0] * n, [0.0] * n, [0.0] * n
    arrivals: list[list[float]] = [[0.0] * m] + [[] for _ in range(n - 1)]  # of the value that F(s, i) takes
    states: list[list[float]] = []
    skipped, t = 0.0, 0
    while t < m:
        for s in range(n):
            for i in range(ahead[s]) if t == 0 else (ahead[s] + t - 1,) if ahead[s] + t <= m else ():
                end, arrived = free[s], arrivals[s][i]
                end = free[s] = (arrived if arrived > end else end) + forward[s]
                if s < last:
                    start = down_free[s]
                    end = down_free[s] = (start if start > end else end) + down[s]
                    arrivals[s + 1].append(end)
        gradient = 0.0
        for s in range(last, -1, -1):
            end = free[s] + again[s]
            end = free[s] = (gradient if gradient > end else end) + backward[s]
            done = ahead[s] + t if ahead[s] + t < m else m
            if skipped + end + (m - done) * turn[s] + (done - t - 1) * (turn[s] - forward[s]) >= deadline[s]:
                return []
            if s > 0:
                start = up_free[s]
                gradient = up_free[s] = (start if start > end else end) + up[s]
        t += 1
        if ahead[0] + t < m:
            waiting = [at for s in range(1, n) for at in arrivals[s][ahead[s] + t - 1 :]]
            states.append([*free, *up_free[1:], *down_free[:-1], *waiting])
            p, shift = _period(states, n)
            periods = (m - ahead[0] - t) // p if p else 0
            if periods:
                m, skipped = m - periods * p, skipped + periods * shift
                states.clear()
    return [end + skipped for end in free]


MOST_PERIOD = 4
SAME = 4e-15  # of the time so far: equal differences may differ by rounding errors up to this


def _period(states: Sequence[Sequence[float]], n: int) -> tuple[int, float]:
    """The period: the least p for which all times of the last round are equally later than those p rounds before, and
    by how many seconds; p = 0 if there is none. The times of one stage are compared first, which rules out most p."""
    now = states[-1]
    slack = SAME * max(now[:n])
    for p in range(1, min(MOST_PERIOD, len(states) - 1) + 1):
        before = states[-1 - p]
        shift = now[0] - before[0]
        if abs(now[n - 1] - before[n - 1] - shift) > slack or len(before) != len(now):
            continue
        if all(abs(a - b - shift) <= slack for a, b in zip(now, before, strict=True)):
            return p, shift
    return 0, 0.0


def _links(problem: Problem, stages: Sequence[HybridStage]) -> tuple[list[float], list[float]]:
    """For each stage the seconds of a transfer to the next, and of a gradient to the one before."""
    down, up = [], [0.0]
    for a, b in pairwise(stages):
        count = problem.chain.cuts[a.end]
        down.append(problem.rate(a.devices, b.devices).seconds(count))
        up.append(problem.rate(b.devices, a.devices).seconds(count))
    return down, up
