"""The planner that DAPPLE's authors released, as far as its answers go: what their tables were made with.

It is not the planner of their paper. It does not evaluate a pipeline but a formula,

    L = (M - 1) block + total / M + transfers + max over s of (all-reduce of s - s block)

where `block` is the slowest stage or transfer of a micro-batch, forward and backward together and a transfer both
ways; and it makes `block` small, by dynamic programming over (layers, devices, which of them are taken). Every number
of identical pipelines is tried, and every cut in two. Data parallelism with all-reduce overlapped is what the best of
them is compared with. Memory is not looked at. The machine is a handful of constants:

    p2p         bytes per second between servers, into a stage within one server, however many cards there are
    all_reduce  the same in a ring, or into a stage that spans servers
    nvlink      within a server, per link; a ring of r devices has r // 2 of them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.planning.hybrid.device_placement import Counts, fill, minus, plus, scatter


@dataclass(frozen=True)
class Machine:
    """Devices per server, and the constants above, in bytes per second; `memory` is bytes of one device."""

    servers: Counts
    p2p: float
    all_reduce: float
    nvlink: float = 25e9
    memory: float = 16e9

    def receive(self, senders: Counts, receivers: Counts) -> float:
        """Seconds per byte from one stage to the next."""
        here = _only(receivers)
        if here is None:
            return 1 / self.all_reduce
        remote = sum(senders) - senders[here]
        return remote / sum(senders) / self.p2p if remote else 1 / self.nvlink

    def ring(self, counts: Counts) -> float:
        """Seconds per byte of an all-reduce."""
        r = sum(counts)
        if r == 1:
            return 0.0
        return 2 * (r - 1) / r / (self.all_reduce if _only(counts) is None else self.nvlink * (r // 2))


def _only(counts: Counts) -> int | None:
    """The one server that has all of the devices, None if several have."""
    here = [server for server, count in enumerate(counts) if count]
    return here[0] if len(here) == 1 else None


# The constants that reproduce the tables of the paper. Those of A and B are the released ones; 10 Gb/s is taken at its
# nominal rate, although the authors measured 0.32 GB/s: with that, half of the rows for C come out otherwise.
CONFIGURATIONS = {
    "A": Machine((8, 8), 1.0e9, 3.0e9),
    "B": Machine((1,) * 16, 1.0e9, 3.0e9),
    "C": Machine((1,) * 16, 1.25e9, 1.25e9),
}


@dataclass(frozen=True)
class Stage:
    """Layers `first` to `end` - 1 on devices per server, those after the first `before` of each."""

    first: int
    end: int
    before: Counts
    counts: Counts


@dataclass(frozen=True)
class Candidate:
    """Stages, how many identical pipelines their devices form, and the seconds of a step by the formula."""

    stages: tuple[Stage, ...]
    pipelines: int
    latency: float


@dataclass(frozen=True)
class Job:
    """A step of `batch` samples in micro-batches of `micro_batch` for each pipeline."""

    chain: Chain
    machine: Machine
    batch: int
    micro_batch: int

    @cached_property
    def times(self) -> tuple[float, ...]:
        """Running sums of forward and backward, for all samples on one device."""
        by = self.batch / self.chain.batch
        return tuple((f + b) * by for f, b in zip(self.chain.forwards, self.chain.backwards, strict=True))

    @cached_property
    def crossing(self) -> tuple[float, ...]:
        """Bytes of all samples across a cut before layer p."""
        return tuple(count * self.batch / self.chain.batch for count in self.chain.cuts)

    def micro_batches(self, pipelines: int) -> int:
        return self.batch // pipelines // self.micro_batch


def candidates(job: Job) -> list[Candidate]:
    """The plans that are considered, the fastest first."""
    devices, found = sum(job.machine.servers), []
    for pipelines in sorted({devices // n for n in range(2, devices + 1)}):
        sizes = [n for n in range(2, devices + 1) if devices // n == pipelines]
        tables = _Tables(job, pipelines, max(sizes))
        found += [tables.best(n) for n in sizes]
    for n in {devices} | ({2} if devices > 2 and devices % 2 == 0 else set()):
        found.append(_Tables(job, devices // n, n, straight=True).best(n))
    found.append(halves(job))
    return sorted(
        (one for one in found if one is not None and one.latency < inf), key=lambda one: (one.latency, one.pipelines)
    )


def best(job: Job) -> Candidate:
    """The fastest plan by the formula."""
    return candidates(job)[0]


# The dynamic programming ----------------------------------------------------------------------------------------


def pure_placements(sizes: Counts, used: Counts, need: int) -> list[Counts]:
    """`need` more devices by each of DAPPLE's policies that differs. Fresh first and append first give up where their
    own servers do not suffice."""
    fresh, begun = ([s for s in range(len(sizes)) if (used[s] == 0) == new] for new in (True, False))
    found = (fill(sizes, used, need, fresh), fill(sizes, used, need, begun), scatter(sizes, used, need))
    return list(dict.fromkeys(one for one in found if one is not None))


def _replicated(servers: Counts, used: Counts, need: int, pipelines: int) -> set[Counts]:
    """The devices of one stage in all pipelines, which are placed one after the other."""
    reached = {used}
    for _ in range(pipelines):
        reached = {plus(at, one) for at in reached for one in pure_placements(servers, at, need)}
    return {minus(at, used) for at in reached}


@dataclass
class _Row:
    """For some number of devices, taken in one way, and each number of layers: the least block, and the last stage."""

    block: list[float]
    last: list[tuple[int, int, Counts, Counts] | None]  # where it starts, its size, what was taken before, its devices


@dataclass
class _Tables:
    """Rows by devices per pipeline and by what is taken; filled for stages of `size` devices per pipeline in all."""

    job: Job
    pipelines: int
    size: int
    straight: bool = False
    rows: list[dict[Counts, _Row]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [{} for _ in range(self.size + 1)]
        none = (0,) * len(self.job.machine.servers)
        for m in range(1, (1 if self.straight else self.size) + 1):
            first = pure_placements(self.job.machine.servers, none, m * self.pipelines)[0]
            block = [inf] + [max(0.0, time) / (m * self.pipelines) for time in self.job.times[1:]]
            self.rows[m][first] = _Row(block, [(0, m, none, first)] * len(block))
        for m in range(2, self.size + 1):
            for more in range(1, 2 if self.straight else m):
                self._extend(m, more)

    def _extend(self, m: int, more: int) -> None:
        """Plans for m devices whose last stage has `more` of them."""
        servers = self.job.machine.servers
        for used, row in self.rows[m - more].items():
            for counts in sorted(_replicated(servers, used, more, self.pipelines), reverse=True):
                taken = plus(used, counts)
                n = len(row.block)
                target = self.rows[m].setdefault(taken, _Row([inf] * n, [None] * n))
                self._stage(row, target, used, counts, more)

    def _stage(self, row: _Row, target: _Row, used: Counts, counts: Counts, more: int) -> None:
        """A last stage on `counts` after each prefix in `row`."""
        times, machine, share = self.job.times, self.job.machine, more * self.pipelines
        ready = []
        for k, (block, last) in enumerate(zip(row.block, row.last, strict=True)):
            per_byte = machine.receive(last[3], counts) if last is not None and k else inf
            ready.append(max(block, 2 * self.job.crossing[k] * per_byte) if block < inf else inf)
        for j in range(2, len(times)):
            best, at = target.block[j], 0
            for k in range(j - 1, 0, -1):
                seconds = (times[j] - times[k]) / share
                if seconds >= best:
                    break
                seconds = max(seconds, ready[k])
                if seconds < best:
                    best, at = seconds, k
            if at:
                target.block[j], target.last[j] = best, (at, more, used, counts)

    def best(self, m: int) -> Candidate | None:
        """The plan with the least block on all layers and m devices per pipeline."""
        n = len(self.job.times) - 1
        row = min(self.rows[m].values(), key=lambda row: row.block[n], default=None)
        if row is None or row.block[n] == inf:
            return None
        stages, block = [], row.block[n]
        while True:
            last = row.last[n]
            assert last is not None
            first, size, used, counts = last
            stages.append(Stage(first, n, used, counts))
            if first == 0:
                return _candidate(self.job, tuple(reversed(stages)), self.pipelines, block)
            m -= size
            n, row = first, self.rows[m][used]


def halves(job: Job) -> Candidate | None:
    """The best of all plans of two stages that take all devices; here a transfer counts once, not both ways."""
    return min(_halves(job), key=lambda one: one.latency, default=None)


def _halves(job: Job) -> Iterator[Candidate]:
    servers, times = job.machine.servers, job.times
    none, n = (0,) * len(servers), len(times) - 1
    for r in range(1, sum(servers)):
        for first in pure_placements(servers, none, r):
            for second in pure_placements(servers, first, sum(servers) - r):
                per_byte = job.machine.receive(first, second)
                for cut in range(1, n):
                    block = max(times[cut] / r, (times[n] - times[cut]) / sum(second), job.crossing[cut] * per_byte)
                    stages = (Stage(0, cut, none, first), Stage(cut, n, first, second))
                    yield _candidate(job, stages, 1, block)


def _candidate(job: Job, stages: tuple[Stage, ...], pipelines: int, block: float) -> Candidate:
    """The formula at the top."""
    m = job.micro_batches(pipelines)
    if m == 0:
        return Candidate(stages, pipelines, inf)
    block /= m
    seconds = block * (m - 1) + job.times[-1] / pipelines / m
    for a, b in pairwise(stages):
        seconds += job.crossing[b.first] / pipelines / m * job.machine.receive(a.counts, b.counts)
    late = 0.0
    for s, stage in enumerate(stages):
        parameters = job.chain.parameters[stage.end] - job.chain.parameters[stage.first]
        late = max(late, parameters * job.machine.ring(stage.counts) - s * block)
    return Candidate(stages, pipelines, seconds + late)


# Data parallelism -----------------------------------------------------------------------------------------------


def data_parallel_time(job: Job, activations: float, copies: float) -> float:
    """Seconds of a data parallel step whose all-reduce, layer by layer, runs beside the backward of the last of its
    micro-batches. These are as large as memory lets them: `activations` is bytes per sample at the peak, `copies` how
    often parameters are kept. Inf if not even one sample fits."""
    chain, machine = job.chain, job.machine
    samples = _accumulated(job, activations, copies)
    if samples == 0:
        return inf
    by = samples / chain.batch / 2  # the backward is taken for half of the time
    ring = machine.ring(machine.servers)
    finished = free = 0.0
    for layer in reversed(chain.layers):
        finished += (layer.forward + layer.backward) * by
        free = max(free, finished) + layer.parameters * ring
    return job.times[-1] / sum(machine.servers) + free - finished


def _accumulated(job: Job, activations: float, copies: float) -> int:
    """The largest share of the batch that memory lets be a micro-batch and that divides it."""
    room = int((job.machine.memory - job.chain.parameters[-1] * copies) / activations)
    if room <= 0:
        return 0
    if room >= job.batch:
        return job.batch
    rounds = -(-job.batch // room)
    while rounds < job.batch // 2 + 1 and job.batch % rounds:
        rounds += 1
    return job.batch // rounds


def hybrid_plan(job: Job, candidate: Candidate) -> HybridPlan:
    """The candidate as a plan: identical pipelines are replicas that take turns in larger micro-batches."""
    starts = list(accumulate(job.machine.servers, initial=0))

    def devices(stage: Stage) -> tuple[int, ...]:
        spans: Sequence[tuple[int, int, int]] = list(zip(starts, stage.before, stage.counts, strict=False))
        return tuple(start + before + i for start, before, count in spans for i in range(count))

    stages = tuple(HybridStage(stage.first, stage.end, devices(stage)) for stage in candidate.stages)
    return HybridPlan(job.chain.model, stages, job.micro_batches(candidate.pipelines))
